"""Greedy tokens equal those of transformers exactly, under every scheduling of the engine."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.llm import LLM, SamplingParams

MAX_TOKENS = 12
# Lengths around multiples of every block size and of CHUNK.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97, 128, 130)
CHUNK = 48
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)

Oracle = Callable[[Path, list[list[int]]], list[list[int]]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of two shared prefixes, with lengths around all those multiples."""
    rng = random.Random(7)
    stems = [[rng.randrange(5, 300) for _ in range(max(LENGTHS))] for _ in range(2)]
    return [stems[i % 2][:length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    known: dict[tuple[Path, tuple[int, ...]], list[int]] = {}

    def tokens(path: Path, prompts: list[list[int]]) -> list[list[int]]:
        model = None
        for prompt in prompts:
            if (path, tuple(prompt)) not in known:
                model = model or LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
                known[path, tuple(prompt)] = _greedy(model, prompt)
        return [known[path, tuple(prompt)] for prompt in prompts]

    return tokens


@pytest.mark.quick_cells("native")
@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
def test_at_every_block_size_batched_and_chunked(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle, block_size: int
) -> None:
    with _llm(tiny_llama, block_size=block_size, max_num_batched_tokens=CHUNK) as llm:
        assert _generate(llm, prompts) == oracle(tiny_llama, prompts)


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_from_the_cache(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle, block_size: int
) -> None:
    with _llm(tiny_llama, block_size=block_size) as llm:
        first = _generate(llm, prompts)
        again = llm.generate(_as_ids(prompts), GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, again, strict=True):
            assert output.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
        assert [output.outputs[0].token_ids for output in again] == first
        assert first == oracle(tiny_llama, prompts)


@pytest.mark.slow
def test_without_the_cache_nothing_is_reused(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle
) -> None:
    with _llm(tiny_llama, enable_prefix_caching=False) as llm:
        _generate(llm, prompts)
        again = llm.generate(_as_ids(prompts), GREEDY, use_tqdm=False)
        assert all(output.num_cached_tokens == 0 for output in again)
        assert [output.outputs[0].token_ids for output in again] == oracle(tiny_llama, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_when_sequences_are_preempted(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle, caching: bool
) -> None:
    # The longest request alone needs 36 blocks; 40 do not hold two of the long ones.
    with _llm(
        tiny_llama, block_size=4, num_blocks=40, enable_prefix_caching=caching, max_model_len=160
    ) as llm:
        assert _generate(llm, prompts) == oracle(tiny_llama, prompts)
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.quick_cells("native-1", "pytorch-1")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_with_each_step_prepared_while_the_one_before_it_runs(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle, num_ranks: int
) -> None:
    with _llm(
        tiny_llama,
        tensor_parallel_size=num_ranks,
        max_num_batched_tokens=CHUNK,
        async_scheduling=True,
    ) as llm:
        assert _generate(llm, prompts) == oracle(tiny_llama, prompts)
        assert _generate(llm, prompts) == oracle(tiny_llama, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False])
def test_on_two_tensor_parallel_ranks(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle, caching: bool
) -> None:
    with _llm(
        tiny_llama,
        tensor_parallel_size=2,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=caching,
    ) as llm:
        assert _generate(llm, prompts) == oracle(tiny_llama, prompts)
        assert _generate(llm, prompts) == oracle(tiny_llama, prompts)


def test_one_after_the_other_as_together(
    tiny_llama: Path, prompts: list[list[int]], oracle: Oracle
) -> None:
    with _llm(tiny_llama) as llm:
        alone = [_generate(llm, [prompt])[0] for prompt in prompts]
    assert alone == oracle(tiny_llama, prompts)


def _greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    """transformers' greedy tokens, by a whole forward pass for each, without a cache."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _llm(model: Path, **options: object) -> LLM:
    settings = {"num_blocks": 1024, "max_num_seqs": 32, "num_threads": 1, "dtype": "float32"}
    return LLM(model, **(settings | options))  # type: ignore[arg-type]


def _generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(_as_ids(prompts), GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def _as_ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]
