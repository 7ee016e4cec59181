"""Mistral, a Llama with a sliding window: greedy tokens are those of transformers."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from quire.llm import LLM, SamplingParams

WINDOW = 24
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def make_mistral(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], Path]:
    def make(window: int | None) -> Path:
        torch.manual_seed(0)
        config = MistralConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            sliding_window=window,
            dtype=torch.float32,
            initializer_range=0.2,
        )
        path = tmp_path_factory.mktemp("mistral") / f"window-{window}"
        MistralForCausalLM(config).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("window", [WINDOW, None])
def test_tokens_in_a_window_are_those_of_transformers(
    window: int | None, make_mistral: Callable[[int | None], Path]
) -> None:
    path = make_mistral(window)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in (1, WINDOW, WINDOW + 1, 70, 150)]
    model = MistralForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = [_greedy(model, prompt) for prompt in prompts]
    assert window is None or expected != [_greedy(model, prompt[-8:]) for prompt in prompts]
    for chunk in (2048, 40):
        with LLM(
            path, device="cpu", num_blocks=64, num_threads=1, max_num_seqs=8,
            max_num_batched_tokens=chunk,
        ) as llm:  # fmt: skip
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False
            )
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@torch.inference_mode()
def _greedy(model: MistralForCausalLM, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        logits = model(torch.tensor([token_ids])).logits[0, -1]
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]
