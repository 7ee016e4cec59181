"""Decode steps of a random model in bfloat16, int8 and w4, in turns, and the loss of accuracy.

    python -m bench.quantized [--shape S|M|L] [--rows 1 32] [--threads N] [--rounds N]

Steps are whole ones of the engine's only rank; the fastest and the median of all rounds are shown.
Accuracy is the Kullback-Leibler divergence of the demo model's next tokens from float32, over
answers of its own.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench.gpu.model import decode_step, open_random
from bench.peers.checkpoints import MAX_POSITIONS, SHAPES, VOCAB_SIZE, Shape, config_entries
from torch import Tensor

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.api.config import EngineConfig
from quire.worker.model import load
from quire.worker.model.loader import Weights
from quire.worker.model.tensor_parallel import TensorParallel
from quire.worker.ranks.executor import InProcessExecutor
from quire.worker.runner.model_runner import ModelRunner

MODES: dict[str, Any] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "w4": {"quantization": "w4"},
}
CONTEXT = 64
NUM_ANSWERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    times(SHAPES[arguments.shape], arguments.rows, arguments.threads, arguments.rounds)
    accuracy()


def times(shape: Shape, rows: list[int], threads: int, rounds: int) -> None:
    print(f"| {shape.name}, {threads} thread(s) | rows | ms, fastest | ms, median | of bfloat16 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_entries(shape)))
        executors = {name: _executor(Path(folder), threads, mode) for name, mode in MODES.items()}
        for count in rows:
            step = decode_step(count, CONTEXT, VOCAB_SIZE)
            taken: dict[str, list[float]] = {name: [] for name in MODES}
            for _ in range(rounds):
                for name, executor in executors.items():
                    start = time.perf_counter()
                    executor.submit(step)
                    executor.result()
                    taken[name].append(1000 * (time.perf_counter() - start))
            for name, each in taken.items():
                ratio = min(taken["bfloat16"]) / min(each)
                print(
                    f"| {name} | {count} | {min(each):.2f} | {statistics.median(each):.2f} "
                    f"| {ratio:.2f} |",
                    flush=True,
                )


def _executor(folder: Path, threads: int, mode: dict[str, Any]) -> InProcessExecutor:
    config = EngineConfig(
        model=folder,
        dtype="bfloat16",
        device="cpu",
        max_model_len=MAX_POSITIONS,
        num_blocks=512,
        num_threads=threads,
        **mode,
    )
    with (
        mock.patch.object(load, "open_checkpoint"),
        mock.patch.object(Weights, "open", open_random),
    ):
        return InProcessExecutor(config)


def accuracy() -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    with LLM(demo_model.PATH, num_blocks=256) as llm:
        chats = [[{"role": "user", "content": q}] for q in demo_model.QUESTIONS[:NUM_ANSWERS]]
        outputs = [llm.chat(chat, params, use_tqdm=False)[0] for chat in chats]
    texts = [[*(each.prompt_token_ids or []), *each.outputs[0].token_ids] for each in outputs]
    exact = [_log_probabilities(text, dtype="float32") for text in texts]
    print("\n| demo model, its answers | divergence / 1000 | same first token |")
    print("| --- | ---: | ---: |")
    for name, mode in MODES.items():
        divergences, agreed = [], []
        for text, exact_TV in zip(texts, exact, strict=True):
            found_TV = _log_probabilities(text, dtype="bfloat16", **mode)
            divergences.append((exact_TV.exp() * (exact_TV - found_TV)).sum(-1))
            agreed.append(exact_TV.argmax(-1) == found_TV.argmax(-1))
        mean = 1000 * float(torch.cat(divergences).mean())
        print(f"| {name} | {mean:.3f} | {100 * float(torch.cat(agreed).double().mean()):.1f} % |")


def _log_probabilities(text: list[int], **settings: Any) -> Tensor:
    """Of the next token after each, ``[T, V]``, decoded one by one."""
    config = EngineConfig(
        model=demo_model.PATH, device="cpu", num_blocks=64, num_threads=1, **settings
    )
    runner = ModelRunner(config, device=torch.device("cpu"), tp=TensorParallel())
    runner.allocate(runner.num_blocks_that_fit())
    rows = []
    for position, token in enumerate(text):
        step = decode_step(1, position + 1, VOCAB_SIZE)
        step.token_ids_T[:] = np.array([token])
        logits = runner.forward(step)
        assert logits is not None
        rows.append(logits[0])
    return torch.stack(rows).double().log_softmax(-1)


if __name__ == "__main__":
    main()
