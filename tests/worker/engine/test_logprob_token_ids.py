"""Log-probabilities of the tokens that a request names: those of transformers, in any batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.worker.engine_requests import request
from transformers import AutoModelForCausalLM

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.request.errors import InvalidRequest

NAMED = [7, 4095, 31, 7]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprob_token_ids=NAMED)
PROMPTS = ["The sea", "A planet is", "A harbor is"]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(demo_model.PATH, dtype="float32", num_blocks=128, num_threads=1) as engine:
        yield engine


@pytest.mark.parametrize("num_top", [None, 0, 2])
def test_they_are_those_of_transformers(demo: LLM, num_top: int | None) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    params = replace(PARAMS, logprobs=num_top)
    output = demo.generate("A planet is", params, use_tqdm=False)[0]
    completion, num_prompt = output.outputs[0], len(output.prompt_token_ids)
    with torch.inference_mode():
        ids = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        expected = model(ids).logits[0].log_softmax(-1)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    total = 0.0
    for index, (token, told) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        row_V = expected[num_prompt + index - 1]
        best = row_V.topk(num_top or 0).indices.tolist()
        assert list(told) == list(dict.fromkeys([*best, *NAMED, token]))
        for token_id, each in told.items():
            assert each.logprob == pytest.approx(float(row_V[token_id]), abs=1e-4)
            rank = 1 + int((row_V > row_V[token_id]).sum())
            assert each.rank == (rank if token_id in (*best, token) else None)
        total += float(row_V[token])
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_they_are_the_same_in_a_batch_and_name_no_other_requests_tokens(demo: LLM) -> None:
    params = [
        replace(PARAMS, seed=seed, logprob_token_ids=ids)
        for seed, ids in enumerate([NAMED, None, [5], [], list(range(128)), [31]])
    ]
    together = demo.generate(2 * PROMPTS, params, use_tqdm=False)
    for prompt, each, output in zip(2 * PROMPTS, params, together, strict=True):
        alone = demo.generate(prompt, each, use_tqdm=False)[0].outputs[0]
        assert output.outputs[0].logprobs == alone.logprobs
        assert (alone.logprobs is None) == (not each.logprob_token_ids)


def test_scores_of_the_prompt_do_not_have_them(demo: LLM) -> None:
    params = replace(PARAMS, max_tokens=1, prompt_logprobs=1, logprobs=1)
    output = demo.generate("A planet is", params, use_tqdm=False)[0]
    assert output.outputs[0].logprobs is not None
    assert {*NAMED} < {*output.outputs[0].logprobs[0]}
    for scores in (output.prompt_logprobs or [])[1:]:
        assert scores is not None
        assert len(scores) <= 2
        assert all(each.rank is not None for each in scores.values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-1], "logprob_token_ids="),
        (["5"], "logprob_token_ids="),
        (5, "logprob_token_ids=5"),
        (range(129), "logprob_token_ids has 129: at most 128"),
        ([5, 10**6], "1000000 at position 1 of the logprob_token_ids"),
    ],
)
def test_what_is_out_of_bounds_is_refused(demo: LLM, ids: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        demo.engine.add_request(request("a", [5], logprob_token_ids=ids))
