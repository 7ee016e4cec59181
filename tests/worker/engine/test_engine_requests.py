"""Ends and refusals of an engine's requests."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.steps import banned_ids
from tests.worker.engine_requests import Generate, MakeEngine, range_prompt, request, run

from quire.worker.blocks.hashing import Feature
from quire.worker.request.errors import ConfigError, InvalidRequest, QueueFull, RankFailure
from quire.worker.request.limits import derive_seed
from quire.worker.request.request import Prepared

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
    banned = [banned_ids(step.sampling, 0) for step in executor.steps]
    assert banned == [[1, 7], [1, 7], [], []]


def test_a_bias_holds_for_every_token_and_a_ban_outweighs_it(make_engine: MakeEngine) -> None:
    engine, executor = make_engine()
    bias = {7: 5.0, 9: -1.5}
    run(engine, request("a", [2], max_tokens=3, min_tokens=1, stop_token_ids=[7], logit_bias=bias))
    found = []
    for step in executor.steps:
        edits = step.sampling.adjustments
        assert edits is not None
        found.append(dict(zip(edits.biased_ids_A.tolist(), edits.bias_A.tolist(), strict=True)))
    assert found[0] == {1: -np.inf, 7: -np.inf, 9: -1.5}
    assert found[1:] == [bias, bias][: len(found) - 1]


@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_penalties_name_each_token_of_output_and_prompt_once(
    make_engine: MakeEngine, generate: Generate, repetition: float
) -> None:
    engine, executor = make_engine()
    prompt = [5, 5, 6]
    output, _ = generate(prompt, max_tokens=12, stop=())
    penalised = request(
        *("a", prompt),
        max_tokens=12,
        resumed=output[:3],
        presence_penalty=0.5,
        repetition_penalty=repetition,
    )
    run(engine, penalised)
    for num_output, step in enumerate(executor.steps, 3):
        edits = step.sampling.adjustments
        assert edits is not None
        counts = Counter(output[:num_output])
        if repetition != 1:
            counts.update(dict.fromkeys(prompt, 0))
        found = zip(edits.seen_ids_E.tolist(), edits.seen_counts_E.tolist(), strict=True)
        assert sorted(found) == sorted(counts.items())
        assert edits.seen_rows_E.tolist() == [0] * len(counts)
        assert (edits.presence_S[0], edits.repetition_S[0]) == (0.5, repetition)


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
    make_engine: MakeEngine, one: Prepared, message: str
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


@pytest.mark.parametrize(
    ("field", "value"),
    [("adapter", "sha"), ("features", (Feature(begin=0, num_tokens=1, digest=bytes(32)),))],
)
def test_a_request_for_what_the_model_has_not_is_refused_even_if_checked(
    make_engine: MakeEngine, field: str, value: Any
) -> None:
    engine, _ = make_engine()
    asks = request("a", [1, 2], **{field: value, "is_checked": True})
    with pytest.raises(
        InvalidRequest, match=f"{field}=.*: (this model takes none|adapters are not)"
    ):
        engine.add_request(asks)


def test_a_checked_request_is_checked_again_only_where_it_is_too_long(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequest, match="max_tokens=1000000"):
        engine.add_request(replace(request("a", [1], max_tokens=1_000_000), is_checked=True))
    monkeypatch.setattr("quire.worker.request.check.check_request", None)
    checked = replace(request("b", [1, 2], max_tokens=2), is_checked=True)
    assert len(run(engine, checked)["b"].token_ids) == 2
