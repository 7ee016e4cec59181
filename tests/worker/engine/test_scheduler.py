"""The scheduler: which prompt is computed next, and which sequence is preempted."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.prepared import prepared

from quire.worker.engine.waiting import AGING
from quire.worker.group_engine import GroupEngine
from quire.worker.request.errors import ConfigError
from quire.worker.request.request import Prepared

MakeEngine = Callable[..., tuple[GroupEngine, Any]]
Generate = Callable[..., tuple[list[int], str]]

POLICIES = ["fcfs", "shortest_prefill"]


def prompt(length: int, *, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, 50, length).tolist()
    return tokens


def request(
    request_id: str, tokens: Sequence[int], *, max_tokens: int = 1, priority: int = 0
) -> Prepared:
    return prepared(request_id, tokens, max_tokens=max_tokens, ignore_eos=True, priority=priority)


def run(engine: GroupEngine) -> dict[str, list[int]]:
    """Runs all requests; returns the tokens of each, ordered by first tokens."""
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    return outputs


def num_computed(executor: Any) -> int:
    return sum(len(step.token_ids_T) for step in executor.steps)


def test_of_those_that_wait_the_shortest_begins(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    for length in (9, 7, 8, 3):
        engine.add_request(request(str(length), prompt(length, seed=length)))
    assert list(run(engine)) == ["3", "7", "8", "9"]


def test_what_is_cached_does_not_count(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_num_seqs=1)
    engine.add_request(request("first", prompt(12)))
    run(engine)
    engine.add_request(request("new", prompt(9, seed=1)))
    engine.add_request(request("again", prompt(17)))
    assert list(run(engine)) == ["again", "new"]


def test_a_short_prompt_overtakes_a_long_one_that_has_begun_and_keeps_its_blocks(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine(num_blocks=40, max_num_batched_tokens=16)
    engine.add_request(request("long", prompt(100)))
    engine.step()
    engine.add_request(request("short", prompt(20, seed=1)))
    outputs = run(engine)
    assert list(outputs) == ["short", "long"]
    assert num_computed(executor) == 120
    assert outputs["long"] == generate(prompt(100), max_tokens=1)[0]
    assert outputs["short"] == generate(prompt(20, seed=1), max_tokens=1)[0]


def test_a_long_prompt_is_overtaken_for_so_long_and_no_longer(make_engine: MakeEngine) -> None:
    length, budget = 40, 8
    engine, executor = make_engine(max_num_seqs=2, max_num_batched_tokens=budget)
    engine.add_request(request("long", prompt(length)))
    began = ended = 0
    number = 0
    while not ended:
        number += 1
        # Short prompts that fill each step keep arriving.
        engine.add_request(request(str(number), prompt(budget, seed=number)))
        ended = num_computed(executor) * any(d.request_id == "long" for d in engine.step())
        began = began or num_computed(executor) * (engine.stats().num_running > 0)
    assert began > 2 * budget
    assert ended <= length / AGING + length + 2 * budget


@pytest.mark.parametrize("policy", POLICIES)
def test_less_priority_goes_first_whatever_the_length(make_engine: MakeEngine, policy: str) -> None:
    engine, _ = make_engine(max_num_batched_tokens=8, scheduling_policy=policy)
    for number, (length, priority) in enumerate([(9, 0), (3, 5), (12, -1), (9, 0)]):
        tokens = prompt(length, seed=number)
        engine.add_request(request(str(number), tokens, priority=priority))
    assert list(run(engine)) == ["2", "0", "3", "1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_important_prompt_overtakes_one_that_has_begun(
    make_engine: MakeEngine, policy: str
) -> None:
    engine, executor = make_engine(
        num_blocks=50, max_num_batched_tokens=16, scheduling_policy=policy
    )
    engine.add_request(request("usual", prompt(60)))
    engine.step()
    engine.add_request(request("urgent", prompt(80, seed=1), priority=-1))
    assert list(run(engine)) == ["urgent", "usual"]
    assert num_computed(executor) == 140


@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_important_gives_up_its_blocks(
    make_engine: MakeEngine, generate: Generate, policy: str
) -> None:
    engine, _ = make_engine(num_blocks=8, scheduling_policy=policy)
    # The older one is the less important here.
    for number, priority in enumerate([1, 0]):
        tokens = prompt(7, seed=number)
        engine.add_request(request(str(number), tokens, max_tokens=14, priority=priority))
    ended = []
    outputs: dict[str, list[int]] = {"0": [], "1": []}
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id] += delta.token_ids
            ended += [delta.request_id] * bool(delta.finish_reason)
    assert engine.stats().num_preemptions == 1
    assert ended == ["1", "0"]
    for number in (0, 1):
        expected, _ = generate(prompt(7, seed=number), max_tokens=14, stop=())
        assert outputs[str(number)] == expected


def test_a_decode_of_the_same_step_is_not_preempted_for_a_prompt(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, _ = make_engine(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=4)
    engine.add_request(request("long", prompt(18)))
    engine.step()
    engine.add_request(request("short", prompt(4, seed=1), max_tokens=8))
    # Together they run out of blocks in a step that already has a token of the short one.
    outputs = run(engine)
    assert engine.stats().num_preemptions == 0
    assert outputs["long"] == generate(prompt(18), max_tokens=1)[0]
    assert outputs["short"] == generate(prompt(4, seed=1), max_tokens=8, stop=())[0]


def test_room_for_a_prompt_that_has_begun_is_not_given_away(make_engine: MakeEngine) -> None:
    engine, executor = make_engine(num_blocks=16, max_num_batched_tokens=16)
    engine.add_request(request("long", prompt(48)))
    engine.step()
    # 12 of 16 blocks are used or reserved. Of these requests of 2 blocks each, one finds room
    # beside a block for the long one's first decode.
    for number in range(1, 5):
        engine.add_request(request(str(number), prompt(5, seed=number), max_tokens=4))
    engine.step()
    assert engine.stats().num_running == 2
    run(engine)
    assert engine.stats().num_preemptions == 0
    assert num_computed(executor) == 48 + 4 * (5 + 3)


@pytest.mark.parametrize("priority", [0, -1])
def test_who_overtakes_waits_for_a_prefix_that_is_being_computed(
    make_engine: MakeEngine, generate: Generate, priority: int
) -> None:
    engine, executor = make_engine(num_blocks=60, max_num_batched_tokens=16)
    shared = prompt(64)
    prompts = {"long": [*shared, *prompt(60, seed=1)], "short": [*shared, 5, 6]}
    engine.add_request(request("long", prompts["long"]))
    engine.step()
    engine.add_request(request("short", prompts["short"], priority=priority))
    outputs = run(engine)
    assert list(outputs) == ["short", "long"]
    assert num_computed(executor) == 64 + 60 + 2
    for request_id, tokens in prompts.items():
        assert outputs[request_id] == generate(tokens, max_tokens=1)[0]


def test_a_prefix_that_many_wait_for_is_shared_out_among_them(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=200, max_num_batched_tokens=16)
    shared = prompt(64)
    engine.add_request(request("alone", prompt(20, seed=1)))
    for number in range(4):
        engine.add_request(request(f"one of four {number}", [*shared, number + 2]))
    assert list(run(engine)) == [f"one of four {number}" for number in range(4)] + ["alone"]


def test_what_is_computed_meanwhile_no_longer_counts(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=200, max_num_batched_tokens=16)
    shared = prompt(64)
    for number in range(3):
        engine.add_request(request(str(number), [*shared, number + 2]))
    pending = []
    while engine.has_work:
        pending.append(engine.stats().num_pending_prefill_tokens)
        engine.step()
    # The first computes 16 tokens a step for all three. The last single token of a prompt that has
    # begun does not count, like a decode's.
    assert pending == [67, 51, 35, 19, 2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_what_is_pending_is_what_is_computed_until_all_decode(
    make_engine: MakeEngine, policy: str, seed: int
) -> None:
    engine, executor = make_engine(
        num_blocks=2000, block_size=4, max_num_batched_tokens=24, scheduling_policy=policy
    )
    rng = Random(seed)
    chats = [prompt(rng.randint(1, 80), seed=i) for i in range(3)]
    for number in range(12):
        chat = rng.choice(chats)
        tokens = [*chat[: rng.randint(1, len(chat))], *prompt(rng.randint(1, 40), seed=number // 2)]
        if len(tokens) % 4 == 0:
            tokens.append(1)  # A full last block would recompute its last token.
        engine.add_request(request(str(number), tokens))
        if rng.random() < 0.3:
            engine.step()
        if rng.random() < 0.3:
            engine.abort(str(rng.randint(0, number)))
    seen = []
    while engine.has_work:
        stats = engine.stats()
        seen.append((stats.num_pending_prefill_tokens, stats.num_running, num_computed(executor)))
        engine.step()
    for num_pending, num_running, num_before in seen:
        # Each prompt's last token counts, but for one that has nothing else left to compute.
        assert 0 <= num_computed(executor) - num_before - num_pending <= num_running


def test_an_unknown_policy_is_refused_by_name(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"scheduling_policy='lifo': one of \('fcfs', "):
        make_engine(scheduling_policy="lifo")


def test_a_prompt_whose_prefix_was_evicted_goes_back_in_line(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=16)
    engine.add_request(request("first", prompt(40)))
    run(engine)
    engine.add_request(request("evicts", prompt(60, seed=1), priority=-1))
    engine.add_request(request("again", prompt(45)))
    engine.add_request(request("new", prompt(20, seed=2)))
    assert list(run(engine)) == ["evicts", "new", "again"]
