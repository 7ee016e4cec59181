"""Log-probabilities of prompts equal those of transformers, under any scheduling of the engine."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.llm import LLM, RequestOutput, SamplingParams
from quire.worker.request.errors import InvalidRequest
from quire.worker.step.messages import MAX_SCORED_TOKENS

SCORES = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
LENGTHS = (1, 2, 16, 33, 70, 71, 130)
Scores = list[dict[int, tuple[float, int]] | None]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    stem = [rng.randrange(5, 300) for _ in range(max(LENGTHS))]
    return [stem[:length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """For each prompt, transformers' log-probabilities after each token except the last."""
    model: Any = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        logits = [model(input_ids=torch.tensor([prompt])).logits[0, :-1] for prompt in prompts]
    return [each.double().log_softmax(-1) for each in logits]


@pytest.mark.quick_cells("native-whole", "native-chunked", "native-preempted", "pytorch-ahead")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 4},
        {"async_scheduling": True, "max_num_batched_tokens": 48},
        {"tensor_parallel_size": 2, "enable_prefix_caching": False},
        {"num_blocks": 40, "block_size": 4, "max_model_len": 140},
    ],
    ids=["whole", "chunked", "ahead", "ranks", "preempted"],
)
def test_each_token_of_the_prompt_is_scored(
    tiny_llama: Path,
    prompts: list[list[int]],
    expected: list[torch.Tensor],
    options: dict[str, Any],
) -> None:
    with _llm(tiny_llama, **options) as llm:
        plain = _tokens(llm, prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        for _ in range(2):  # The second time, everything is cached.
            outputs = _generate(llm, prompts, SCORES)
            assert [output.outputs[0].token_ids for output in outputs] == plain
            for prompt, output, logprobs in zip(prompts, outputs, expected, strict=True):
                _check(prompt, _scores(output), logprobs)


def test_scores_have_the_same_bits_in_any_batch(tiny_llama: Path, prompts: list[list[int]]) -> None:
    with _llm(tiny_llama) as llm:
        together = [_scores(output) for output in _generate(llm, prompts, SCORES)]
    with _llm(tiny_llama, max_num_batched_tokens=17, max_num_seqs=2) as llm:
        alone = [_scores(_generate(llm, [prompt], SCORES)[0]) for prompt in prompts]
    assert alone == together


def test_only_the_first_completion_scores_the_prompt_and_the_others_find_it(
    tiny_llama: Path, prompts: list[list[int]]
) -> None:
    params = SamplingParams(
        n=3, temperature=1, seed=4, max_tokens=4, logprobs=1, prompt_logprobs=0, ignore_eos=True
    )
    with _llm(tiny_llama) as llm:
        scored = _generate(llm, prompts, params)
    for prompt, output in zip(prompts, scored, strict=True):
        scores = _scores(output)
        assert [list(each or ()) for each in scores] == [[], *([token] for token in prompt[1:])]
        assert all(len(each.logprobs or ()) == 4 for each in output.outputs)
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=4, ignore_eos=True)
    with _llm(tiny_llama) as llm:
        plain = _generate(llm, prompts, params)
    assert [[each.token_ids for each in output.outputs] for output in scored] == [
        [each.token_ids for each in output.outputs] for output in plain
    ]


def test_a_long_prompt_is_scored_in_bounded_steps_beside_others(tiny_llama: Path) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(5, 300) for _ in range(200)] for _ in range(4)]
    with _llm(tiny_llama, max_num_batched_tokens=1024) as llm:
        sizes = []
        submit = llm.engine._executor.submit

        def watched(step: Any) -> None:
            sizes.append(len(step.samples_S))
            submit(step)

        llm.engine._executor.submit = watched  # type: ignore[method-assign]
        outputs = _generate(llm, prompts, SCORES)
    assert MAX_SCORED_TOKENS <= max(sizes) <= MAX_SCORED_TOKENS + len(prompts)
    assert all(len(_scores(output)) == 200 for output in outputs)


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 40, "block_size": 4, "max_model_len": 140}], ids=["", "small"]
)
def test_what_is_cached_before_the_first_score_is_not_computed_again(
    tiny_llama: Path, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    """Scores after a cached prefix have the same bits as those computed over the whole prompt."""
    with _llm(tiny_llama, **options) as llm:
        whole = [_scores(output) for output in _generate(llm, prompts, SCORES)]
        for start in (0, 1, 2, 16, 17, 50, 69, 130):
            params = replace(SCORES, logprob_start_len=start)
            asked = [prompt for prompt in prompts if len(prompt) >= start]
            outputs = _generate(llm, asked, params)
            for prompt, output in zip(asked, outputs, strict=True):
                expected = whole[prompts.index(prompt)]
                start_at = max(start, 1)
                assert _scores(output) == [None] * start_at + expected[start_at:]
                if not options:
                    num_shared = min(max(start - 1, 0), len(prompt) - 1) // 16 * 16
                    assert output.num_cached_tokens == num_shared
        with pytest.raises(InvalidRequest, match="logprob_start_len=3 is out of range: the prompt"):
            _generate(llm, [[5, 6]], replace(SCORES, logprob_start_len=3))


def test_more_scores_than_fit_a_message_are_refused(tiny_llama: Path) -> None:
    with _llm(tiny_llama) as llm, pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.worker.request.limits.MAX_PROMPT_SCORES", 29)
        with pytest.raises(InvalidRequest, match="30 log-probabilities: at most 29"):
            _generate(llm, [[5] * 10], SCORES)


def _check(prompt: Sequence[int], scores: Scores, logprobs: torch.Tensor) -> None:
    assert len(scores) == len(prompt)
    assert scores[0] is None
    for token, score, expected_V in zip(prompt[1:], scores[1:], logprobs, strict=True):
        assert score is not None
        best = set(expected_V.topk(2).indices.tolist())
        assert set(score) == best | {token}
        for each, (logprob, rank) in score.items():
            assert logprob == pytest.approx(float(expected_V[each]), abs=1e-4)
            assert rank == 1 + int((expected_V > expected_V[each]).sum())


def _scores(output: RequestOutput) -> Scores:
    assert output.prompt_logprobs is not None
    return [
        None if each is None else {token: (it.logprob, it.rank or 0) for token, it in each.items()}
        for each in output.prompt_logprobs
    ]


def _llm(model: Path, **options: object) -> LLM:
    settings = {"num_blocks": 1024, "max_num_seqs": 32, "num_threads": 1, "dtype": "float32"}
    return LLM(model, **(settings | options))  # type: ignore[arg-type]


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(ids, params, use_tqdm=False)


def _tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in _generate(llm, prompts, params)]
