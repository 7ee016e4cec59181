"""The engine's prefix caching, scheduling and statistics."""

from dataclasses import replace

import numpy as np
import pytest
from tests.worker.engine_requests import Generate, MakeEngine, range_prompt, request, run

from quire.worker.request.progress import Progress
from quire.worker.step.messages import StepInput

# Prefix caching


@pytest.mark.parametrize(("length", "num_cached"), [(7, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_at_least_the_prompts_last_token_to_compute(
    make_engine: MakeEngine, length: int, num_cached: int
) -> None:
    engine, _ = make_engine()
    prompt = range_prompt(length)
    assert run(engine, request("first", prompt))["first"].num_cached_tokens == 0
    assert run(engine, request("again", prompt))["again"].num_cached_tokens == num_cached


def test_full_blocks_made_by_decode_are_cached_too(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, _ = make_engine()
    prompt = range_prompt(6)
    output, _ = generate(prompt, max_tokens=7, stop=())
    run(engine, request("first", prompt, max_tokens=7))
    # 13 tokens; the last one's KV was never needed, so 3 blocks are full.
    next_turn = [*prompt, *output, 3]
    assert run(engine, request("next", next_turn))["next"].num_cached_tokens == 12


def test_requests_of_one_step_share_the_prefix_that_the_first_computes(
    make_engine: MakeEngine,
) -> None:
    engine, executor = make_engine()
    prompt = range_prompt(12)
    ended = run(engine, *(request(f"r{tail}", [*prompt, tail], max_tokens=1) for tail in (0, 1)))
    assert len(executor.steps) == 1
    assert len(executor.steps[0].token_ids_T) == 13 + 1
    assert [ended[f"r{tail}"].num_cached_tokens for tail in (0, 1)] == [0, 12]


def test_requests_of_different_salts_share_nothing(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    prompt = range_prompt(12)
    ended = run(engine, request("a", prompt, salt="tenant a"), request("b", prompt, salt="b"))
    assert ended["b"].num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_stored(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(enable_prefix_caching=False)
    for request_id in ("a", "b"):
        ended = run(engine, request(request_id, range_prompt(12)))
        assert ended[request_id].num_cached_tokens == 0
    assert engine.stats().num_cached_blocks == engine.events.next_seq == 0


def test_two_requests_that_make_the_same_block_end_up_sharing_it(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    prompt = range_prompt(8)
    for request_id in ("a", "b"):
        engine.add_request(request(request_id, prompt, max_tokens=9))
    for _ in range(6):
        engine.step()
    # 8 + 5 tokens have KV: 3 full blocks in common, though each wrote the second and the third
    # itself, and a last one each.
    assert engine.stats().num_held_blocks == 3 + 2


def test_reset_forgets_prefixes_but_not_while_blocks_are_in_use(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    engine.add_request(request("a", range_prompt(8), max_tokens=2))
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.step()
    assert engine.reset_prefix_cache()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    assert run(engine, request("b", range_prompt(8)))["b"].num_cached_tokens == 0


# Scheduling


def test_decodes_come_first_and_chunks_fill_the_budget(make_engine: MakeEngine) -> None:
    engine, executor = make_engine(max_num_seqs=2, max_num_batched_tokens=6)
    engine.add_request(request("a", range_prompt(3), max_tokens=9))
    engine.step()
    engine.add_request(request("b", range_prompt(16, first=9), max_tokens=1))
    for _ in range(4):
        engine.step()
    shapes = [(s.num_decodes, np.diff(s.query_starts_B1).tolist()) for s in executor.steps]
    assert shapes == [(0, [3]), (1, [1, 5]), (1, [1, 5]), (1, [1, 5]), (2, [1, 1])]
    assert [len(s.samples_S) for s in executor.steps] == [1, 1, 1, 1, 2]


def test_requests_start_in_the_order_of_their_arrival(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_num_seqs=2)
    for number in range(5):
        engine.add_request(request(f"r{number}", range_prompt(5, first=number), max_tokens=1))
    started = []
    while engine.has_work:
        started += [output.request_id for output in engine.step()]
    assert started == ["r0", "r1", "r2", "r3", "r4"]


def test_the_newest_is_preempted_and_finds_its_own_blocks_again(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine(num_blocks=8)
    prompts = {"old": range_prompt(7), "new": range_prompt(7, first=20)}
    ended = run(engine, *(request(key, prompts[key], max_tokens=14) for key in prompts))
    stats = engine.stats()
    assert stats.num_preemptions == 1
    # The old one needed a fifth block when both had four: the new one lost its last.
    num_computed = sum(len(step.token_ids_T) for step in executor.steps)
    assert num_computed == 2 * (7 + 14 - 1) + 4
    # Its hits after the preemption are not counted as hits of the prompt.
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (14, 0)
    assert ended["new"].num_cached_tokens == 0
    for key, prompt in prompts.items():
        assert list(ended[key].token_ids) == generate(prompt, max_tokens=14, stop=())[0]


def test_a_requests_progress_tells_its_chunks_and_its_preemptions(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=5)
    told = {"old": Progress(), "new": Progress()}
    first = {"old": 0, "new": 20}
    run(
        engine,
        *(
            replace(request(key, range_prompt(7, first=first[key]), max_tokens=14), progress=each)
            for key, each in told.items()
        ),
    )
    old, new = told["old"], told["new"]
    assert engine.stats().num_preemptions == 1
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert (old.num_chunks, old.num_prefilled_tokens) == (2, 7)
    assert new.num_prefilled_tokens > 7
    assert old.scheduled_s is not None
    assert new.scheduled_s is not None
    assert old.scheduled_s <= new.scheduled_s


def test_a_preempted_request_goes_on_before_those_that_came_after_it(
    make_engine: MakeEngine,
) -> None:
    engine, _ = make_engine(num_blocks=8, max_num_seqs=2)
    ended = run(
        engine,
        request("a", range_prompt(7), max_tokens=14),
        request("b", range_prompt(7, first=20), max_tokens=14),
        request("c", range_prompt(20, first=30), max_tokens=2),
    )
    assert engine.stats().num_preemptions == 1
    assert list(ended) == ["a", "b", "c"]


def test_a_long_prompt_waits_for_room_instead_of_being_preempted_over_and_over(
    make_engine: MakeEngine,
) -> None:
    engine, executor = make_engine(num_blocks=24, max_num_batched_tokens=16)
    for number in range(4):
        engine.add_request(request(f"r{number}", range_prompt(4, first=9 * number), max_tokens=16))
    engine.step()
    run(engine, request("long", range_prompt(80, first=5), max_tokens=4))
    assert engine.stats().num_preemptions == 0
    # No token was computed twice.
    assert sum(len(step.token_ids_T) for step in executor.steps) == 4 * 19 + 83


def test_a_request_waits_although_its_prefix_is_cached_when_the_rest_finds_no_room(
    make_engine: MakeEngine,
) -> None:
    engine, _ = make_engine(num_blocks=8)
    prompt = range_prompt(12)
    run(engine, request("first", prompt, max_tokens=1))
    engine.add_request(request("holder", range_prompt(15, first=30), max_tokens=2))
    engine.step()
    # 3 blocks are cached and 4 held: the hit would leave one block for the 3 that are missing.
    engine.add_request(request("waits", [*prompt, *range_prompt(8, first=40)], max_tokens=1))
    assert engine.step()[0].request_id == "holder"
    assert engine.stats().num_waiting == 1
    assert run(engine)["waits"].num_cached_tokens == 12


def test_no_block_is_let_go_before_the_step_that_uses_it_has_ended(
    make_engine: MakeEngine,
) -> None:
    engine, executor = make_engine()
    checked = []

    def all_are_held(step: StepInput) -> None:
        slots = set((step.slot_mapping_T // 4).tolist())
        checked.append(engine.stats().num_held_blocks >= len(slots | _table_blocks(step)))

    executor.on_execute = all_are_held
    run(engine, *(request(f"r{n}", range_prompt(8), max_tokens=n + 1) for n in range(4)))
    assert checked
    assert all(checked)


def _table_blocks(step: StepInput) -> set[int]:
    lengths = -(-step.seq_lens_B // 4)
    tables = [step.block_tables_BM[row, :length] for row, length in enumerate(lengths.tolist())]
    return set(np.concatenate(tables).tolist())


# Stats


def test_stats_say_what_waits_runs_and_is_wasted(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_num_seqs=1, max_num_batched_tokens=8, scheduling_policy="fcfs")
    engine.add_request(request("a", range_prompt(9)))
    engine.add_request(request("b", range_prompt(6, first=30)))
    assert engine.stats().num_pending_prefill_tokens == 15
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_held_blocks, stats.num_wasted_slots, stats.num_held_slots) == (2, 0, 8)
    engine.step()
    stats = engine.stats()
    assert (stats.num_wasted_slots, stats.num_held_slots) == (3, 12)
    assert (stats.num_steps, stats.num_output_tokens, stats.num_pending_prefill_tokens) == (2, 1, 6)


def test_stats_tell_full_steps_from_those_that_left_no_prompt_waiting(
    make_engine: MakeEngine,
) -> None:
    engine, _ = make_engine(max_num_batched_tokens=8)
    engine.add_request(request("a", range_prompt(6)))
    engine.step()
    stats = engine.stats()
    assert (stats.num_prefilled_tokens, stats.num_full_step_tokens) == (6, 0)
    assert stats.full_step_s == 0
    engine.add_request(request("b", range_prompt(12, first=30)))
    engine.step()  # One decode, seven of the twelve.
    stats = engine.stats()
    assert (stats.num_prefilled_tokens, stats.num_full_step_tokens) == (13, 7)
    assert stats.full_step_s > 0
    engine.step()
    stats = engine.stats()
    assert (stats.num_prefilled_tokens, stats.num_full_step_tokens) == (18, 7)
