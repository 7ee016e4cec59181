"""The cost of sampling: decode speed with each kind of parameters as a share of greedy's.

    python -m bench.sampling [--requests N] [--vocab N] [--spread X] [--rounds N]

The model is the shape S with random weights and a vocabulary of its own; ``--spread`` is the
standard deviation of its logits, which are nearly normal. All cases are measured in turns, and the
median of all rounds is shown.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.peers.checkpoints import SHAPES, config_entries
from bench.report import command, markdown
from transformers import LlamaConfig, LlamaForCausalLM

from quire.llm import LLM, SamplingParams

NUM_TOKENS = 32
PROMPT_TOKENS = 16
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "repetition 1.1, greedy": {"temperature": 0, "repetition_penalty": 1.1},
    "presence and frequency, greedy": {
        "temperature": 0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "min_tokens, greedy": {"temperature": 0, "min_tokens": NUM_TOKENS, "ignore_eos": False},
    "logit_bias, greedy": {"temperature": 0, "logit_bias": {5: 1.0, 9: -100.0}},
    "logprobs 5, greedy": {"temperature": 0, "logprobs": 5},
}


def main() -> None:
    parser = command("bench.sampling", __doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--spread", type=float, default=2.5)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    prompts: list[Any] = [
        {"prompt_token_ids": rng.integers(3, arguments.vocab, PROMPT_TOKENS).tolist()}
        for _ in range(arguments.requests)
    ]
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _make_checkpoint(Path(folder), arguments.vocab, arguments.spread)
        with LLM(checkpoint, num_blocks=1024, enable_prefix_caching=False) as llm:
            for _ in range(arguments.rounds + 1):
                for name, values in CASES.items():
                    given = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **values}
                    began_s = time.perf_counter()
                    llm.generate(prompts, SamplingParams(**given), use_tqdm=False)
                    taken[name].append(time.perf_counter() - began_s)
    seconds = {name: statistics.median(each[1:]) for name, each in taken.items()}
    print(f"{arguments.requests} sequences, vocabulary {arguments.vocab}, {arguments.spread=}")
    rows = [
        [name, f"{arguments.requests * NUM_TOKENS / each:.0f}", f"{seconds['greedy'] / each:.2f}"]
        for name, each in seconds.items()
    ]
    print(f"\n{markdown(['', 'tokens/s', 'share of greedy'], rows)}")


def _make_checkpoint(folder: Path, vocab_size: int, spread: float) -> Path:
    torch.manual_seed(0)
    values: dict[str, Any] = config_entries(SHAPES["S"]) | {"vocab_size": vocab_size}
    config = LlamaConfig(**values)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.fill_(spread / (config.initializer_range * config.hidden_size**0.5))
    model.bfloat16().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
