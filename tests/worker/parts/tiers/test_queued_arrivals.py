"""Queued requests wait for another group's blocks no longer than computing them would take, and use
blocks that arrive in the meantime."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.worker.engine_requests import MakeEngine, range_prompt, request

from quire.worker.blocks.hashing import BlockHash, BlockHashes, as_token_ids, hash_blocks, root_hash
from quire.worker.blocks.kv_format import Bytes, PeerSource
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers import arriving
from quire.worker.parts.tiers import pulls as pulls_module
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.pull import Pull
from quire.worker.request.outputs import TokenDelta

PROMPT = range_prompt(82)
NUM_BLOCKS = 20
"""Number of full blocks of the prompt, without its last token."""
SOURCE = PeerSource(group_id="other", address="", num_blocks=NUM_BLOCKS)
TOKEN_S = 0.001
"""Seconds to compute a token, on the clock of these tests."""


class Group:
    """An engine whose clock advances as it computes, and its pulls."""

    def __init__(self, make_engine: MakeEngine, **options: Any) -> None:
        self.now_s = 0.0
        self.pulls: list[Pull] = []
        self.engine, executor = make_engine(
            num_blocks=200,
            kv_transfer=True,
            host_kv_bytes=96 * 128,
            fetch=self.pulls.append,
            clock=lambda: self.now_s,
            **options,
        )
        executor.on_execute = self._pass
        self.outputs: dict[str, list[TokenDelta]] = {}
        self.ask("first", range_prompt(30, first=40))
        self.run()  # The engine has now measured its speed.

    def _pass(self, step: Any) -> None:
        self.now_s += TOKEN_S * len(step.token_ids_T)

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        source: PeerSource | None = None,
        *,
        resumed: Sequence[int] = (),
    ) -> None:
        self.outputs[name] = []
        self.engine.add_request(replace(request(name, prompt, resumed=resumed), source=source))

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id].append(output)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]


@pytest.fixture
def group(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(arriving, "MIN_SLACK_S", 0.0)
    monkeypatch.setattr("quire.worker.parts.tiers.transfers._WAIT_S", 0.0)
    return Group(make_engine, scheduling_policy="fcfs")


@pytest.fixture
def blocks(make_engine: MakeEngine) -> dict[BlockHash, Bytes]:
    """The prompt's blocks as another group computes them."""
    engine, executor = make_engine(num_blocks=200, kv_transfer=True, host_kv_bytes=96 * 128)
    engine.add_request(request("a", PROMPT))
    while engine.has_work:
        engine.step()
    loan = engine.lend(chain_of(engine, PROMPT), borrower_format=executor.kv_format)
    assert not isinstance(loan, str)
    found: dict[BlockHash, Bytes] = {}
    while len(found) < NUM_BLOCKS:
        engine.step()
        while (lent := loan.next(0)) is not None:
            found[loan.hashes[lent.index]] = loan.host_blocks_XC[lent.slot].copy()
            loan.give_back(lent.slot)
    return found


def chain_of(engine: GroupEngine, prompt: Sequence[int]) -> BlockHashes:
    root = root_hash(
        model_fingerprint="hash-1",
        numerics=engine._executor.numerics,
        kv_dtype="float32",
        block_size=4,
    )
    names = hash_blocks(as_token_ids(prompt[: NUM_BLOCKS * 4]), block_size=4, root=root)
    return BlockHashes.of(names)


def land(pull: Pull, blocks: dict[BlockHash, Bytes], indices: range) -> None:
    for index in indices:
        slot = pull.next_slot(0)
        assert slot is not None
        block_C = blocks[pull.hashes[index]]
        pull.host_blocks_XC[slot] = block_C
        pull.landed(index, slot, checksum_of(block_C))


def test_a_request_waits_a_tenth_of_what_it_wants_and_what_has_landed(
    group: Group, blocks: dict[BlockHash, Bytes]
) -> None:
    group.ask("a", PROMPT, SOURCE)
    (pull,) = group.pulls
    waits = group.engine.arriving
    assert waits is not None
    assert waits.left_s == pytest.approx(0.1 * 80 * TOKEN_S)
    land(pull, blocks, range(3))
    group.step()
    assert waits.left_s == pytest.approx((0.1 * 80 + 3 * 4) * TOKEN_S)
    group.now_s += 0.0199
    group.step()
    assert len(waits) == 1
    group.now_s += 0.0002
    group.step()
    assert len(waits) == 0
    assert pull.is_cancelled
    pull.end()
    group.run()
    fetched = group.outputs["a"][0].fetched
    assert fetched is not None
    assert fetched.num_peer_tokens == 3 * 4
    assert fetched.wait_s == pytest.approx(0.0201)
    assert fetched.error == "17 blocks came too late: computing them is sooner"


def test_what_lands_while_a_request_is_queued_is_not_computed(
    group: Group, blocks: dict[BlockHash, Bytes], generate: Callable[..., Any]
) -> None:
    group.ask("long", range_prompt(400, first=7))
    group.step()
    group.ask("a", PROMPT, SOURCE)
    (pull,) = group.pulls
    group.now_s += 0.05  # Its wait is over, and others are computed now.
    group.step()
    assert not pull.is_cancelled
    land(pull, blocks, range(NUM_BLOCKS))
    pull.end()
    before = group.engine.stats().num_prefilled_tokens
    while not group.outputs["a"]:
        group.step()
    group.run()
    fetched = group.outputs["a"][0].fetched
    assert fetched is not None
    assert (fetched.num_peer_tokens, fetched.error) == (NUM_BLOCKS * 4, "")
    assert group.engine.stats().num_prefilled_tokens - before < 400 + 2
    for name, prompt in (("a", PROMPT), ("long", range_prompt(400, first=7))):
        assert group.tokens(name) == generate(prompt, max_tokens=4)[0]


def test_a_queued_request_lets_go_of_its_pull_when_its_turn_comes_or_it_is_aborted(
    group: Group,
) -> None:
    for name in ("a", "b"):
        group.ask("long", range_prompt(200, first=ord(name)))
        group.step()
        group.ask(name, [*PROMPT[:40], ord(name) % 50, *PROMPT[40:]], SOURCE)
        group.now_s += 0.05
        group.step()
        pull = group.pulls[-1]
        assert not pull.is_cancelled
        if name == "b":
            assert group.engine.abort("b")
        while not pull.is_cancelled:
            group.step()
        pull.end("gone")
        group.run()
    assert not group.engine.has_work
    assert group.engine.stats().num_held_blocks == 0


def test_steps_are_short_while_blocks_come_for_queued_requests(group: Group) -> None:
    sizes: list[int] = []
    executor = group.engine._executor
    executor.on_execute = lambda step: sizes.append(len(step.token_ids_T))  # type: ignore[attr-defined]
    group.ask("long", range_prompt(300, first=7))
    group.ask("a", PROMPT, SOURCE)
    for _ in range(3):
        group.step()
    group.now_s += 0.05
    for _ in range(3):
        group.step()
    assert sizes == [32, 32, 32, 8, 8, 8]


def test_the_oldest_pulls_have_slots_and_each_has_one(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls_module, "_MAX_GRANTED", 6)
    for number in range(8):
        group.ask(f"r{number}", [number, *PROMPT], SOURCE)
    num_granted = [len(pull._granted) for pull in group.pulls]
    num_slots = group.engine.transfers.host_tier.num_slots  # type: ignore[union-attr]
    assert num_granted[0] == num_granted[1] == min(NUM_BLOCKS, num_slots * 3 // 16)
    assert min(num_granted[:6]) >= 1
    assert num_granted[6:] == [0, 0]
    for pull in group.pulls:
        pull.cancel()
        pull.end("gone")
    group.run()


def test_streams_that_come_from_one_group_wait_together(
    group: Group, blocks: dict[BlockHash, Bytes]
) -> None:
    """Five streams of 80 tokens would be computed one after another: on average in 3 times what
    one takes, of which a tenth is waited, and for what has landed meanwhile."""
    for number in range(4):
        group.ask(f"r{number}", [number, *PROMPT], SOURCE, resumed=[9])
    group.ask("a", PROMPT, SOURCE, resumed=[9])
    waits = group.engine.arriving
    assert waits is not None
    assert waits.left_s == pytest.approx(0.1 * 80 * 3 * TOKEN_S)
    land(group.pulls[-1], blocks, range(3))
    group.step()
    assert waits.left_s == pytest.approx((0.1 * 80 * 3 + 3 * 4) * TOKEN_S)
    group.now_s += 0.0359
    group.step()
    assert len(waits) == 5
    for pull in group.pulls:
        pull.end("gone")
    group.run()


def test_those_that_wait_for_other_sources_or_the_same_blocks_count_for_nothing(
    group: Group,
) -> None:
    group.ask("a", PROMPT, SOURCE, resumed=[9])
    group.ask("same", PROMPT, SOURCE, resumed=[9])
    group.ask("other", [7, *PROMPT], replace(SOURCE, group_id="another"), resumed=[9])
    waits = group.engine.arriving
    assert waits is not None
    assert waits.left_s == pytest.approx(0.1 * 80 * TOKEN_S)
    for pull in group.pulls:
        pull.end("gone")
    group.run()


def test_requests_wait_for_what_lands_for_others_and_a_tenth_of_their_own(
    group: Group, blocks: dict[BlockHash, Bytes]
) -> None:
    group.ask("a", PROMPT, SOURCE)
    group.ask("other", [7, *PROMPT], SOURCE)
    waits = group.engine.arriving
    assert waits is not None
    assert waits.left_s == pytest.approx(0.1 * 80 * TOKEN_S)
    land(group.pulls[0], blocks, range(3))
    group.step()
    assert waits.left_s == pytest.approx((0.1 * 80 + 3 * 4) * TOKEN_S)
    for pull in group.pulls:
        pull.end("gone")
    group.run()


def ask_a_slow_source(group: Group, number: int, source: PeerSource = SOURCE) -> bool:
    """Sends a prompt of the same length; returns whether it pulled. Nothing lands in time."""
    num_before = len(group.pulls)
    group.ask(f"r{number}", [number + 7, *PROMPT], source)
    if len(group.pulls) > num_before:
        group.now_s += 0.0081
        group.step()
        group.pulls[-1].end("gone")
    group.run()
    return len(group.pulls) > num_before


def test_a_source_that_answers_too_late_is_asked_for_one_such_request_in_eight(
    group: Group,
) -> None:
    assert [ask_a_slow_source(group, number) for number in range(17)] == [
        *[True, *[False] * 7] * 2,
        True,
    ]
    fetched = group.outputs["r1"][0].fetched
    assert fetched is not None
    assert fetched.error == "20 blocks would come too late: computing them is sooner"
    assert ask_a_slow_source(group, 30, replace(SOURCE, group_id="another"))


def test_a_source_that_answers_too_late_is_asked_where_others_run_and_for_long_prompts(
    group: Group,
) -> None:
    assert ask_a_slow_source(group, 0)
    assert not ask_a_slow_source(group, 1)
    group.ask("long", range_prompt(200, first=3), replace(SOURCE, num_blocks=50))
    assert len(group.pulls) == 2
    group.pulls[-1].end("gone")
    group.step()
    assert group.engine.stats().num_running == 1
    group.ask("beside", [5, *PROMPT], SOURCE)
    assert len(group.pulls) == 3
    group.pulls[-1].end("gone")
    group.run()


def test_a_source_that_answers_in_time_again_is_asked_again(
    group: Group, blocks: dict[BlockHash, Bytes]
) -> None:
    assert [ask_a_slow_source(group, number) for number in range(8)] == [True, *[False] * 7]
    group.ask("a", PROMPT, SOURCE)
    land(group.pulls[-1], blocks, range(NUM_BLOCKS))  # At once: on average in 4 of 8 ms.
    group.pulls[-1].end()
    group.run()
    assert ask_a_slow_source(group, 9)
