"""The engine on a GPU: CUDA graphs, sampling on the device, memory, and generated tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.steps import banning

from quire.kernels.shared_prefix import find_shared
from quire.kernels.triton.launch import SPLIT_TOKENS
from quire.llm import LLM, SamplingParams
from quire.worker.rank import runner as model_runner
from quire.worker.rank.sampling.device import DeviceSampler
from quire.worker.rank.sampling.draw import sample
from quire.worker.rank.staging import Array, stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 64, 100, 300)


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(5)
    return [{"prompt_token_ids": rng.integers(3, 300, n).tolist()} for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(
    tiny_llama: Path, prompts: list[dict[str, list[int]]], oracle: Callable[[Path], Any]
) -> list[list[int]]:
    """transformers' greedy tokens."""
    model, tokens = oracle(tiny_llama), []
    for prompt in prompts:
        token_ids = list(prompt["prompt_token_ids"])
        for _ in range(GREEDY.max_tokens or 0):
            with torch.inference_mode():
                token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
        tokens.append(token_ids[len(prompt["prompt_token_ids"]) :])
    return tokens


def generate(path: Path, prompts: Any, params: SamplingParams, **settings: Any) -> list[list[int]]:
    merged: Any = {"device": "cuda", "num_blocks": 200, "max_num_seqs": 8} | settings
    with LLM(path, **merged) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 40},
        {"block_size": 64, "num_blocks": 100},
        {"num_blocks": 34},  # preempted
        {"num_blocks": None, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.02},
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    settings: dict[str, Any], tiny_llama: Path, prompts: Any, expected: list[list[int]]
) -> None:
    assert generate(tiny_llama, prompts, GREEDY, **settings) == expected


def test_decodes_that_share_a_prefix_generate_what_they_do_apart(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem = [3 + number % 300 for number in range(2 * SPLIT_TOKENS - 60)]
    prompts = [{"prompt_token_ids": [*stem, 4 + row]} for row in range(6)]
    apart = generate(tiny_llama, prompts, GREEDY)

    # Like the runner's own buffers, but as small as possible.
    def eager(*arguments: Any, **options: Any) -> Any:
        return find_shared(*arguments, **options | {"min_saved_tokens": 1})

    monkeypatch.setattr(model_runner, "find_shared", eager)
    assert generate(tiny_llama, prompts, GREEDY) == apart


def test_sampled_tokens_with_penalties_are_those_of_a_cpu(tiny_llama: Path, prompts: Any) -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.9, seed=3, max_tokens=16, repetition_penalty=1.2,
        presence_penalty=0.3, min_tokens=4, ignore_eos=True,
    )  # fmt: skip
    on_cpu = generate(tiny_llama, prompts, params, device="cpu")
    assert generate(tiny_llama, prompts, params) == on_cpu


def test_a_float8_cache_changes_few_tokens(
    tiny_llama: Path, prompts: Any, expected: list[list[int]]
) -> None:
    settings = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    got = generate(tiny_llama, prompts, GREEDY, **settings)
    assert [len(tokens) for tokens in got] == [len(tokens) for tokens in expected]
    assert sum(a[0] == b[0] for a, b in zip(got, expected, strict=True)) >= len(LENGTHS) // 2


def test_a_sampler_on_the_device_draws_what_one_on_the_host_does(driver: Any) -> None:
    logits = torch.randn(32, 5000, generator=torch.Generator().manual_seed(1)) * 3
    batch = driver.sampling(
        32,
        temperature=[0.0, 0.7, 1.0, 1.3] * 8,
        top_p=[1.0, 0.9] * 16,
        top_k=[0] * 16 + [40] * 16,
        seed=np.arange(32),
        position=np.arange(32) * 7,
        num_logprobs=[-1, 0, 5, -1] * 8,
        edits={0: banning([int(logits[0].argmax())])},
    )
    want = sample(logits, batch)
    got = DeviceSampler(torch.device("cuda")).sample(logits.cuda(), batch).wait()
    assert got.token_ids_S.tolist() == want.token_ids_S.tolist()
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


def test_arrays_arrive_on_the_device_as_they_were() -> None:
    arrays: list[Array] = [
        np.arange(5),
        np.arange(12, dtype=np.int32).reshape(3, 4),
        np.zeros((2, 0), np.int32),
    ]
    for array, tensor in zip(arrays, stage(arrays, torch.device("cuda")), strict=True):
        assert tensor.device.type == "cuda"
        assert np.array_equal(tensor.cpu().numpy(), array)
