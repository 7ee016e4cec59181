"""Blocks of a real model that return to the KV cache from host memory, from disk after a restart,
or from another engine: tokens and log-probabilities have the same bits as if all were computed."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.engine_requests import request
from tests.worker.parts.tiers.lenders import Lender

from quire.worker.blocks.kv_format import PeerSource
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.pull import Pull
from quire.worker.rank.executor import make_executor
from quire.worker.request.outputs import Fetched, TokenLogprobs

PROMPTS = np.random.default_rng(7).integers(3, 320, (4, 100)).tolist()
NUM_SHARED = 96
"""Number of tokens of each prompt that others may have computed, in blocks of 16."""
FEW_BLOCKS = 24
"""Cache size in blocks, with room for three of the prompts."""
MOST = PeerSource(group_id="other", address="", num_blocks=NUM_SHARED // 16)

KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
}


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    fetched: Fetched = Fetched()  # noqa: RUF009  # It never changes.

    @property
    def content(self) -> tuple[list[int], list[TokenLogprobs]]:
        return self.token_ids, self.logprobs


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests wait for blocks, since such a small model would compute them sooner."""
    monkeypatch.setattr("quire.worker.parts.tiers.arriving.MIN_SLACK_S", 60.0)


@pytest.fixture
def engine_of(
    tiny_llama: Path, config_of: Callable[..., Any]
) -> Iterator[Callable[..., GroupEngine]]:
    engines = []

    def make(*, fetch: Any = None, **options: Any) -> GroupEngine:
        config = config_of(tiny_llama, speculation=False, max_model_len=256, **options)
        executor, facts = make_executor(config)
        engine = GroupEngine(config, replace(facts, fingerprint="tiny"), executor, fetch=fetch)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def ask(
    engine: GroupEngine,
    prompts: Sequence[list[int]] = PROMPTS,
    *,
    at_once: bool = False,
    source: PeerSource | None = None,
    max_tokens: int = 6,
) -> list[Answer]:
    """The answers to prompts, sent one after the other or at once."""
    answers = {f"r{number}": Answer() for number in range(len(prompts))}
    left = list(zip(answers, prompts, strict=True))
    while left or engine._sequences:
        while left and (at_once or not engine._sequences):
            name, prompt = left.pop(0)
            asked = request(name, prompt, max_tokens=max_tokens, temperature=0, logprobs=2)
            engine.add_request(replace(asked, source=source))
        for output in engine.step():
            answer = answers[output.request_id]
            assert output.error is None
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.num_cached = output.num_cached_tokens
            if output.fetched is not None:
                answer.fetched = output.fetched
    return list(answers.values())


def contents(answers: list[Answer]) -> list[Any]:
    return [answer.content for answer in answers]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back_from_host_memory(
    kind: str, ahead: bool, engine_of: Callable[..., GroupEngine]
) -> None:
    computed = contents(ask(engine_of(**KINDS[kind])))
    options = {"num_blocks": FEW_BLOCKS, "kv_offloading_size": 0.01, "async_scheduling": ahead}
    engine = engine_of(**KINDS[kind], **options)
    assert contents(ask(engine)) == computed
    again = ask(engine)
    assert contents(again) == computed
    assert [answer.num_cached for answer in again] == [NUM_SHARED] * 4
    stats = engine.stats()
    assert stats.num_host_tokens == sum(answer.fetched.num_host_tokens for answer in again) > 0
    assert (stats.num_disk_tokens, stats.num_peer_tokens, stats.num_corrupt_blocks) == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_engine_has_its_blocks_on_disk(
    kind: str, engine_of: Callable[..., GroupEngine], tmp_path: Path
) -> None:
    computed = contents(ask(engine_of(**KINDS[kind])))
    options = {"num_blocks": FEW_BLOCKS, "kv_disk_dir": tmp_path, **KINDS[kind]}
    first = engine_of(**options)
    assert contents(ask(first)) == computed
    first.close()
    second = engine_of(**options)
    held = second.events.snapshot()
    assert [len(tier) for tier in (held.snapshot or (), *held.slower)] == [0, 0, 4 * 6]
    answers = ask(second)
    assert contents(answers) == computed
    assert [answer.num_cached for answer in answers] == [NUM_SHARED] * 4
    assert [answer.fetched.num_disk_tokens for answer in answers] == [NUM_SHARED] * 4
    assert second.stats().num_disk_tokens == 4 * NUM_SHARED


def test_a_disk_takes_what_host_memory_keeps_too(
    engine_of: Callable[..., GroupEngine], tmp_path: Path
) -> None:
    computed = contents(ask(engine_of()))
    options = {"num_blocks": FEW_BLOCKS, "kv_disk_dir": tmp_path, "kv_offloading_size": 0.01}
    first = engine_of(**options)
    assert contents(ask(first)) == contents(ask(first)) == computed
    assert first.stats().num_host_tokens > 0
    first.close()
    answers = ask(engine_of(**options))
    assert contents(answers) == computed
    assert [answer.fetched.num_disk_tokens for answer in answers] == [NUM_SHARED] * 4


RANKS = [(1, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (2, 1)))]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_lenders_ranks", "num_borrowers_ranks"), RANKS)
def test_another_engine_s_blocks_give_the_same(
    kind: str,
    ahead: bool,
    num_lenders_ranks: int,
    num_borrowers_ranks: int,
    engine_of: Callable[..., GroupEngine],
) -> None:
    options = {"kv_transfer": True, "async_scheduling": ahead, **KINDS[kind]}
    lending = engine_of(tensor_parallel_size=num_lenders_ranks, **options)
    computed = contents(ask(lending))
    lender = Lender(lending)
    try:
        borrower = engine_of(tensor_parallel_size=num_borrowers_ranks, fetch=lender, **options)
        answers = ask(borrower, at_once=True, source=MOST)
    finally:
        lender.close()
    is_same = lending._executor.numerics == borrower._executor.numerics
    if not is_same:  # Without the native library, blocks have other names.
        pytest.skip("one rank and two compute other bits here")
    assert contents(answers) == computed
    num_fetched = sum(answer.fetched.num_peer_tokens for answer in answers)
    assert num_fetched == borrower.stats().num_peer_tokens == 4 * NUM_SHARED
    assert lending.stats().num_lent_tokens == 4 * NUM_SHARED


def test_tokens_are_the_same_under_preemption(engine_of: Callable[..., GroupEngine]) -> None:
    prompts = [*PROMPTS, *(prompt[:50] for prompt in PROMPTS)]
    computed = contents(ask(engine_of(), prompts, max_tokens=40))
    for ahead in (False, True):
        engine = engine_of(num_blocks=FEW_BLOCKS, kv_offloading_size=0.01, async_scheduling=ahead)
        for _ in range(2):
            assert contents(ask(engine, prompts, at_once=True, max_tokens=40)) == computed
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_host_tokens > 0


def test_a_damaged_block_is_computed_instead(
    engine_of: Callable[..., GroupEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(num_blocks=FEW_BLOCKS, kv_offloading_size=0.01)
    computed = contents(ask(engine))
    transfers = engine.transfers
    assert transfers is not None
    hashes = engine._intake.sequence(request("x", PROMPTS[0]), 1).hashes
    slot = transfers.match(hashes[len(engine._pool.match(hashes)) :])[0]
    transfers.host_blocks_XC[slot, 3] ^= 4
    with caplog.at_level(logging.ERROR):
        assert contents(ask(engine, PROMPTS[:1])) == computed[:1]
    assert engine.stats().num_corrupt_blocks == 1
    assert f"host memory (tier 1), slot {slot}: block " in caplog.text


def test_a_request_goes_on_without_a_group_that_says_nothing(
    engine_of: Callable[..., GroupEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.parts.tiers.arriving.MIN_SLACK_S", 0.003)
    computed = contents(ask(engine_of()))
    pulls: list[Pull] = []
    engine = engine_of(kv_transfer=True, fetch=pulls.append)
    ask(engine, [PROMPTS[0][::-1]])  # The engine has now measured its speed.
    answers = ask(engine, PROMPTS, at_once=True, source=MOST)
    assert contents(answers) == computed
    assert {answer.num_cached for answer in answers} == {0}
    assert "too late" in answers[0].fetched.error
    assert len(pulls) == 4
    assert all(pull.is_cancelled for pull in pulls)
    assert engine.has_work  # The fetcher may still write to slots.
    for pull in pulls:
        pull.end("gone")
    engine.step()
    assert not engine.has_work


def test_what_came_before_the_end_is_used(engine_of: Callable[..., GroupEngine]) -> None:
    lending = engine_of(kv_transfer=True)
    computed = contents(ask(lending))
    lender = Lender(lending)
    ends: list[Pull] = []

    def stop_after_two(pull: Pull) -> None:
        short = Pull(
            pull.hashes[:2],
            format=pull.format,
            host_blocks_XC=pull.host_blocks_XC,
            source=pull.source,
            on_change=lambda: None,
        )
        short.next_slot = pull.next_slot  # type: ignore[method-assign]
        short.landed = pull.landed  # type: ignore[method-assign]
        short.end = lambda error="": pull.end("it broke")  # type: ignore[method-assign]
        ends.append(short)
        lender(short)

    try:
        borrower = engine_of(kv_transfer=True, fetch=stop_after_two)
        (answer,) = ask(borrower, PROMPTS[:1], source=MOST)
    finally:
        lender.close()
    assert [answer.content] == computed[:1]
    assert answer.num_cached == answer.fetched.num_peer_tokens == 32
    assert answer.fetched.error == "it broke"
    assert borrower.stats().num_failed_pulls == 1


def test_blocks_of_another_format_are_not_lent(engine_of: Callable[..., GroupEngine]) -> None:
    engine = engine_of(kv_transfer=True)
    ask(engine, PROMPTS[:1])
    other = replace(engine._executor.kv_format, num_layers=7)
    hashes = engine._intake.sequence(request("x", PROMPTS[0]), 1).hashes
    refusal = engine.lend(hashes, borrower_format=other)  # type: ignore[arg-type]
    assert refusal == "formats differ: the lender's blocks have num_layers=2, not 7"
