"""Decoding by Quire's description of a model against the same model through transformers.

    python -m bench.through_transformers [--rows 1 8] [--layers 28] [--threads 1] [--repeats 5]

One checkpoint of random weights with the dimensions of Qwen3-0.6B (32,000 tokens of vocabulary).
Both engines are in this process and run in turn; medians of the time of a decode step, on a CPU.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from quire.llm import LLM, SamplingParams
from quire.worker.api.config import ModelImpl

_PROMPT, _STEPS = 64, 16
_IMPLS: tuple[ModelImpl, ...] = ("quire", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), arguments.layers)
        llms = {
            impl: LLM(
                folder,
                model_impl=impl,
                device="cpu",
                num_threads=arguments.threads,
                num_blocks=1024,
                max_model_len=512,
                enable_prefix_caching=False,
            )
            for impl in _IMPLS
        }
        for rows in arguments.rows:
            times: dict[ModelImpl, list[float]] = {impl: [] for impl in _IMPLS}
            for repeat in range(arguments.repeats + 1):  # the first one warms up
                for impl, llm in llms.items():
                    seconds = (_run(llm, rows, 1 + _STEPS) - _run(llm, rows, 1)) / _STEPS
                    if repeat:
                        times[impl].append(seconds)
            own, other = (statistics.median(times[impl]) for impl in _IMPLS)
            print(
                f"{rows} rows: quire {own * 1e3:.1f} ms, transformers {other * 1e3:.1f} ms a step; "
                f"{rows / own:.1f} and {rows / other:.1f} tokens/s, ratio {own / other:.2f}"
            )


def _run(llm: LLM, rows: int, max_tokens: int) -> float:
    prompts = [
        {"prompt_token_ids": [7 * place + row for place in range(_PROMPT)]} for row in range(rows)
    ]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def _save(path: Path, num_layers: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(path)


if __name__ == "__main__":
    main()
