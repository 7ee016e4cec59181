from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from quire.worker.engine import Engine
from quire.worker.errors import ConfigError, InvalidRequest, QueueFull, RankFailure
from quire.worker.hashing import as_token_ids
from quire.worker.request import Request, TokenDelta, derive_seed
from quire.worker.sampling_params import SamplingParams
from quire.worker.step import StepInput

MakeEngine = Callable[..., tuple[Engine, Any]]
Generate = Callable[..., tuple[list[int], str]]
Tokens = dict[str, list[int]]

# Blocks have 4 tokens in these tests, and the end token is 1.


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = 4,
    resumed: Sequence[int] = (),
    salt: str = "",
    **params: Any,
) -> Request:
    defaults: dict[str, Any] = {"seed": 0, "ignore_eos": True}
    return Request(
        request_id=request_id,
        prompt_token_ids=as_token_ids(prompt),
        params=SamplingParams(max_tokens=max_tokens, **{**defaults, **params}),
        resumed_token_ids=as_token_ids(resumed),
        cache_salt=salt,
    )


def run(engine: Engine, *requests: Request) -> dict[str, TokenDelta]:
    """Runs to the end; returns each request's last output, with all of its tokens."""
    for one in requests:
        engine.add_request(one)
    ended: dict[str, TokenDelta] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
            if output.finish_reason:
                ended[output.request_id] = output._replace(token_ids=tokens[output.request_id])
    return ended


def range_prompt(length: int, *, first: int = 2) -> list[int]:
    return [(first + index) % 50 for index in range(length)]


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
    assert [len(s.sample_rows_S) for s in executor.steps] == [1, 1, 1, 1, 2]


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
    # Every token was computed once.
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


# Ends


def test_a_request_ends_at_the_end_token_at_a_stop_token_or_at_its_length(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, _ = make_engine()
    prompt = range_prompt(3)
    free, _ = generate(prompt, max_tokens=30, stop=())
    stop = free[4]
    ended = run(
        engine,
        request("length", prompt, max_tokens=5),
        request("token", prompt, max_tokens=30, stop_token_ids=[stop]),
        request("context", prompt, max_tokens=None),
        request("end", prompt, max_tokens=None, seed=3, ignore_eos=False),
    )
    assert (ended["length"].finish_reason, list(ended["length"].token_ids)) == ("length", free[:5])
    assert ended["token"].finish_reason == "stop"
    assert list(ended["token"].token_ids) == free[: free.index(stop) + 1]
    assert (ended["context"].finish_reason, len(ended["context"].token_ids)) == ("length", 61)
    tokens, reason = generate(prompt, max_tokens=61, seed=3)
    assert (ended["end"].finish_reason, list(ended["end"].token_ids)) == (reason, tokens)


def test_before_min_tokens_neither_end_nor_stop_tokens_are_sampled(
    make_engine: MakeEngine,
) -> None:
    engine, executor = make_engine()
    one = request("a", [2, 3], max_tokens=4, min_tokens=2, stop_token_ids=[7], ignore_eos=True)
    run(engine, one)
    banned = [step.sampling.banned_ids for step in executor.steps]
    assert [ids[0].tolist() if ids else None for ids in banned] == [[1, 7], [1, 7], None, None]


def test_penalties_name_each_token_of_output_and_prompt_once(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine()
    prompt = [5, 5, 6]
    output, _ = generate(prompt, max_tokens=12, stop=())
    run(engine, request("a", prompt, max_tokens=12, resumed=output[:3], presence_penalty=0.5))
    for num_output, step in enumerate(executor.steps, 3):
        (penalties,) = step.sampling.penalties
        if step is executor.steps[-1]:
            ids, counts = np.unique(output[:num_output], return_counts=True)
            order = np.argsort(penalties.output_ids_R)
            assert penalties.output_ids_R[order].tolist() == ids.tolist()
            assert penalties.output_counts_R[order].tolist() == counts.tolist()
            assert sorted(penalties.seen_ids_R.tolist()) == sorted({*prompt, *output[:num_output]})


def test_abort_leaves_nothing_behind_and_says_nothing_more(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for request_id in ("running", "waiting"):
        engine.add_request(request(request_id, range_prompt(6)))
    engine.step()
    assert [engine.abort(key) for key in ("running", "waiting", "running")] == [True, True, False]
    stats = engine.stats()
    assert (stats.num_held_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.num_pending_prefill_tokens == 0
    assert not engine.has_work
    assert engine.step() == []


def test_a_resumed_request_goes_on_behind_the_tokens_it_has(
    make_engine: MakeEngine, generate: Generate
) -> None:
    engine, executor = make_engine()
    prompt = range_prompt(6)
    tokens, _ = generate(prompt, max_tokens=10, stop=())
    engine.add_request(request("a", prompt, max_tokens=10, resumed=tokens[:4]))
    first = engine.step()[0]
    assert (first.token_offset, first.token_ids) == (4, (tokens[4],))
    assert executor.steps[0].sampling.position_S.tolist() == [10]
    assert list(run(engine)["a"].token_ids) == tokens[5:]


def test_a_resumed_request_with_nothing_left_to_say_ends_at_once(make_engine: MakeEngine) -> None:
    engine, executor = make_engine()
    ended = run(
        engine,
        request("length", [2, 3], max_tokens=2, resumed=[8, 9]),
        request("stop", [2, 3], max_tokens=9, resumed=[8, 1], ignore_eos=False),
    )
    assert [ended[key].finish_reason for key in ("length", "stop")] == ["length", "stop"]
    assert ended["length"][1:3] == (2, ())
    assert executor.steps == []
    engine.add_request(request("aborted", [2, 3], max_tokens=2, resumed=[8, 9]))
    assert engine.abort("aborted")
    assert engine.step() == []


def test_log_probabilities_go_to_those_who_asked(make_engine: MakeEngine) -> None:
    engine, executor = make_engine()
    engine.add_request(request("asks", [2], logprobs=2))
    engine.add_request(request("does not", [3]))
    asks, does_not = engine.step()
    assert executor.steps[0].sampling.num_logprobs_S.tolist() == [2, -1]
    assert [entry.token_id for entry in asks.logprobs] == list(asks.token_ids)
    assert does_not.logprobs == ()


def test_seeds_are_given_by_running_number_to_those_without_one(make_engine: MakeEngine) -> None:
    engine, executor = make_engine(seed=5)
    run(engine, *(request(key, [2], max_tokens=1, seed=seed) for key, seed in _SEEDS))
    assert executor.steps[0].sampling.seed_S.tolist() == [derive_seed(5, 0), 7, derive_seed(5, 1)]
    assert derive_seed(5, 0) != derive_seed(5, 1) != derive_seed(6, 1)


_SEEDS: list[tuple[str, int | None]] = [("a", None), ("b", 7), ("c", None)]


# Refusals


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (request("a", []), "prompt is empty: at least one token"),
        (request("a", [3, 50]), "token id 50 at position 1 of the prompt .* 0 to 49"),
        (request("a", [3], resumed=[2, 99]), "token id 99 at position 1 of the resumed output"),
        (request("a", [3], stop_token_ids=[7, 51]), "token id 51 at position 1 of the stop_token"),
        (
            request("a", range_prompt(20)),
            "prompt has 20 tokens and max_model_len is 20, as configured: shorten the prompt to 19",
        ),
        (
            request("a", range_prompt(15), max_tokens=6),
            "15 tokens \\+ max_tokens=6 is 21 tokens and max_model_len is 20.*max_tokens to 5",
        ),
        (
            request("a", [3], max_tokens=1, resumed=[4, 5]),
            "2 resumed tokens are more than the 1 that the request may have",
        ),
        (request("used", [3]), "request_id 'used' is in use"),
    ],
)
def test_what_can_never_be_served_is_refused_with_numbers_and_remedy(
    make_engine: MakeEngine, one: Request, message: str
) -> None:
    engine, _ = make_engine(max_model_len=20)
    engine.add_request(request("used", [2]))
    with pytest.raises(InvalidRequest, match=message):
        engine.add_request(one)
    assert engine.stats().num_waiting == 1


def test_a_request_that_the_pool_can_never_hold_is_refused(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(num_blocks=3)
    assert engine.max_model_len == 12
    with pytest.raises(
        InvalidRequest, match=r"is 13 tokens and max_model_len is 12, .* 3 blocks of 4 tokens hold"
    ):
        engine.add_request(request("a", range_prompt(9), max_tokens=4))
    assert run(engine, request("b", range_prompt(9), max_tokens=3))["b"].finish_reason == "length"


def test_a_context_longer_than_the_models_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="max_model_len=1001: the model was trained for 1000"):
        make_engine(max_model_len=1001)


def test_a_full_queue_refuses_one_more(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(max_num_waiting=1)
    engine.add_request(request("a", [2]))
    with pytest.raises(QueueFull, match="1 requests are waiting, max_num_waiting is 1"):
        engine.add_request(request("b", [2]))
    engine.step()
    engine.add_request(request("b", [2]))


def test_after_a_rank_failed_the_engine_refuses_work(make_engine: MakeEngine) -> None:
    engine, executor = make_engine()
    engine.add_request(request("a", [2]))
    executor.fails = True
    with pytest.raises(RankFailure, match="rank 1 died"):
        engine.step()
    with pytest.raises(RankFailure, match=r"failed in an earlier step.*rank 1 died"):
        engine.step()
    with pytest.raises(RankFailure):
        engine.add_request(request("b", [2]))


def test_a_closed_engine_refuses_work(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(RankFailure, match="the engine is closed"):
        engine.add_request(request("a", [2]))


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
    assert stats.oldest_waiting_s > 0
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
