"""Qwen2, with biases on Q, K and V, and Qwen3, with norms of heads, give transformers' tokens."""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
KINDS: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}


@pytest.fixture(scope="module")
def make_qwen(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(kind: str, **fields: Any) -> Path:
        torch.manual_seed(0)
        config_type, model_type = KINDS[kind]
        config = config_type(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            dtype=torch.float32,
            initializer_range=0.2,
            **fields,
        )
        model = model_type(config)
        with torch.no_grad():  # Otherwise biases are 0 and norms 1.
            for name, parameter in model.named_parameters():
                if name.endswith((".bias", "_norm.weight")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        path = tmp_path_factory.mktemp(kind) / kind
        model.save_pretrained(path)
        return path

    return make


@pytest.mark.quick_cells("native-fields1", "pytorch-fields2-qwen3")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, WINDOW, {"tie_word_embeddings": True}])
def test_tokens_are_those_of_transformers(
    kind: str,
    fields: dict[str, Any],
    make_qwen: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = make_qwen(kind, **fields)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in (1, 16, 33, 70, 150)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = [_greedy(model, prompt) for prompt in prompts]
    settings: list[dict[str, Any]] = [{"max_num_batched_tokens": 40}]
    if not fields:
        settings += [{}, {"tensor_parallel_size": 2}]
    with caplog.at_level(logging.WARNING):
        for chosen in settings:
            assert _generate(path, prompts, **chosen) == expected
    assert fields is WINDOW or native.library() is None or not caplog.messages


def _generate(path: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    with LLM(path, device="cpu", num_blocks=64, num_threads=1, max_num_seqs=8, **settings) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]
