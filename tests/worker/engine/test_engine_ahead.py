"""Asynchronous scheduling, which prepares a step while one runs: special cases. The state machine
has the rest."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from tests.prepared import prepared
from tests.steps import banned_ids

from quire.worker.group_engine import GroupEngine
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared
from quire.worker.step.messages import StepInput

MakeEngine = Callable[..., tuple[GroupEngine, Any]]
Generate = Callable[..., tuple[list[int], str]]
PROMPT = [2, 3, 4, 5, 6, 7]

# Blocks have 4 tokens, and the end token is 1.


def request(request_id: str, prompt: Sequence[int] = PROMPT, **params: Any) -> Prepared:
    defaults: dict[str, Any] = {"seed": 0, "ignore_eos": True, "max_tokens": 6}
    return prepared(request_id, prompt, **(defaults | params))


def late_tokens(executor: Any) -> list[int]:
    return [len(step.late_tokens_L) for step in executor.steps]


def run(engine: GroupEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def test_every_decode_is_submitted_before_its_token_is_known(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine(num_ahead=1)
    engine.add_request(request("a"))
    assert engine.step() == []
    assert run(engine) == {"a": generate(PROMPT, max_tokens=6, stop=())[0]}
    assert late_tokens(executor) == [0, 1, 1, 1, 1, 1]


def test_no_step_is_wasted_on_a_request_that_ends_by_its_length(make_engine: MakeEngine) -> None:
    engine, executor = make_engine(num_ahead=1)
    engine.add_request(request("short", max_tokens=2))
    engine.add_request(request("long", [9, 8], max_tokens=4))
    run(engine)
    assert [len(step.seq_lens_B) for step in executor.steps] == [2, 2, 1, 1]


def test_what_follows_an_end_token_is_thrown_away(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine(num_blocks=64, num_ahead=1)
    output, reason = generate([2, 3, 4], max_tokens=200, seed=3)
    assert reason == "stop"
    engine.add_request(request("a", [2, 3, 4], seed=3, max_tokens=200, ignore_eos=False))
    assert run(engine) == {"a": output}
    assert len(executor.steps) == len(output) + 1
    assert engine.stats().num_held_blocks == 0
    assert engine.stats().num_output_tokens == len(output)


def test_blocks_of_an_aborted_request_wait_for_the_step_that_writes_them(
    make_engine: MakeEngine,
) -> None:
    engine, executor = make_engine(num_ahead=1)
    held: list[int] = []
    executor.on_execute = lambda step: held.append(engine.stats().num_held_blocks)
    engine.add_request(request("a"))
    engine.step()
    assert engine.abort("a")
    assert engine.has_work
    assert engine.stats().num_held_blocks == 2
    assert engine.step() == []
    assert held == [2]
    assert engine.stats().num_held_blocks == 0
    assert not engine.has_work


def test_a_reset_waits_for_what_nobody_wants_any_more(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_ahead=1)
    engine.add_request(request("a"))
    engine.step()
    engine.abort("a")
    assert engine.reset_prefix_cache()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


def test_penalties_follow_when_the_tokens_before_are_known(make_engine: MakeEngine) -> None:
    engine, executor = make_engine(num_ahead=1)
    seen: list[list[int]] = []

    def note(step: StepInput) -> None:
        assert step.sampling.adjustments is not None
        seen.append(step.sampling.adjustments.seen_counts_E.tolist())

    executor.on_execute = note
    engine.add_request(request("a", presence_penalty=0.5, max_tokens=4))
    run(engine)
    assert late_tokens(executor) == [0, 1, 1, 1]
    assert [step.edits_follow for step in executor.steps] == [False, True, True, True]
    assert [sum(counts) for counts in seen] == [0, 1, 2, 3]


def test_what_follows_belongs_to_the_requests_that_go_on(
    make_engine: MakeEngine, generate: Generate
) -> None:
    """Some requests end and some begin in the steps whose adjustments follow later."""
    engine, executor = make_engine(num_blocks=64, num_ahead=1)
    counts: dict[int, list[int]] = {}

    def note(step: StepInput) -> None:
        adjustments = step.sampling.adjustments
        assert adjustments is not None
        for sample, seed in enumerate(step.sampling.seed_S.tolist()):
            rows = adjustments.seen_rows_E == sample
            counts.setdefault(seed, []).append(int(adjustments.seen_counts_E[rows].sum()))

    executor.on_execute = note
    deltas: list[TokenDelta] = []
    prompts = {seed: [seed + 2, *PROMPT] for seed in range(5)}
    for seed, prompt in prompts.items():
        engine.add_request(
            request(str(seed), prompt, seed=seed, presence_penalty=0.5, max_tokens=2 + 2 * seed)
        )
        deltas += engine.step()
    while engine.has_work:
        deltas += engine.step()
    for seed, prompt in prompts.items():
        expected = generate(prompt, seed=seed, max_tokens=2 + 2 * seed, stop=())[0]
        found = [delta.token_ids for delta in deltas if delta.request_id == str(seed)]
        assert [*chain(*found)] == expected
        assert counts[seed] == [*range(2 + 2 * seed)]


def test_a_request_with_penalties_has_a_token_in_every_step(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine(num_ahead=1)
    engine.add_request(request("penalised", presence_penalty=0.5, max_tokens=4))
    engine.add_request(request("plain", PROMPT[::-1], max_tokens=8))
    tokens = run(engine)
    assert tokens["penalised"] == generate(PROMPT, max_tokens=4, stop=())[0]
    assert tokens["plain"] == generate(PROMPT[::-1], max_tokens=8, stop=())[0]
    assert len(executor.steps) == 8
    assert late_tokens(executor) == [0, 2, 2, 2, 1, 1, 1, 1]


def test_min_tokens_counts_what_is_in_flight(make_engine: MakeEngine) -> None:
    engine, executor = make_engine(num_ahead=1)
    engine.add_request(request("a", max_tokens=4, min_tokens=2))
    run(engine)
    assert late_tokens(executor) == [0, 1, 1, 1]
    banned = [banned_ids(step.sampling, 0) for step in executor.steps]
    assert [len(ids) > 0 for ids in banned] == [True, True, False, False]


def test_blocks_with_tokens_in_flight_are_named_when_the_tokens_come(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, _ = make_engine(num_ahead=1)
    output, _ = generate(PROMPT, max_tokens=7, stop=())
    engine.add_request(request("a", max_tokens=7))
    run(engine)
    # 13 tokens; the last one's KV was never needed, so 3 blocks are full.
    engine.add_request(request("next", [*PROMPT, *output, 3], max_tokens=1))
    run(engine)
    assert engine.stats().num_hit_tokens == 12


def test_nobody_is_preempted_while_a_step_runs(make_engine: MakeEngine, generate: Generate) -> None:
    engine, executor = make_engine(num_blocks=8, num_ahead=1)
    prompts = {"old": [*range(2, 9)], "new": [*range(20, 27)]}
    for key, prompt in prompts.items():
        engine.add_request(request(key, prompt, max_tokens=14))
    tokens = run(engine)
    assert engine.stats().num_preemptions == 1
    assert sum(len(step.token_ids_T) for step in executor.steps) == 2 * (7 + 14 - 1) + 4
    for key, prompt in prompts.items():
        assert tokens[key] == generate(prompt, max_tokens=14, stop=())[0]
