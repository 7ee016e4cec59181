"""One rank with all threads against several ranks that share them: what tensor parallelism costs.

    python bench/ranks.py [--models M L] [--ranks 2] [--repeats 3] [--gloo]

Both compute the same tokens from the same checkpoint of random weights on the same cores: one rank
with as many threads as there are ranks, and ranks of one thread each. They run in turn; medians.
The ratio is one rank's time divided by that of several: what of the machine is left. The smallest
model, S, has 9 and 3 heads, which two ranks cannot share.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoint

from quire.llm import LLM, SamplingParams

CACHE = Path.home() / ".cache" / "quire" / "checkpoints"
WORKLOADS = {"decode batch": (16, 32, 32), "all at once": (256, 16, 16)}
"""Prompt tokens, output tokens, requests."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["M"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gloo", action="store_true", help="no native library: gloo, PyTorch")
    args = parser.parse_args()
    if args.gloo:
        os.environ["QUIRE_NATIVE"] = "0"
    for name in args.models:
        compare(name, ranks=args.ranks, repeats=args.repeats)


def compare(name: str, *, ranks: int, repeats: int) -> None:
    """Prints a line for each workload."""
    path = make_checkpoint(SHAPES[name], CACHE)
    settings: dict[str, dict[str, Any]] = {
        "one rank": {"num_threads": ranks},
        "ranks": {"num_threads": 1, "tensor_parallel_size": ranks},
        "ranks, async": {
            "num_threads": 1,
            "tensor_parallel_size": ranks,
            "async_scheduling": True,
        },
    }
    with contextlib.ExitStack() as stack:
        llms = {
            label: stack.enter_context(
                LLM(path, dtype="bfloat16", enable_prefix_caching=False, num_blocks=1024, **options)
            )
            for label, options in settings.items()
        }
        for workload, shape in WORKLOADS.items():
            times: dict[str, list[float]] = {label: [] for label in llms}
            for label, seconds in runs(llms, shape, repeats):
                times[label].append(seconds)
            medians = {label: statistics.median(values) for label, values in times.items()}
            shown = "   ".join(
                f"{label} {seconds * 1e3:7.0f} ms ({medians['one rank'] / seconds:.2f})"
                for label, seconds in medians.items()
            )
            print(f"{name} {workload:12}  {shown}", flush=True)


def runs(
    llms: dict[str, LLM], shape: tuple[int, int, int], repeats: int
) -> Iterator[tuple[str, float]]:
    """Every engine in turn, once unmeasured; seconds of each run."""
    num_prompt, num_output, num_requests = shape
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, VOCAB_SIZE, (num_requests, num_prompt)).tolist()
    prompts = [{"prompt_token_ids": ids} for ids in tokens]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    for repeat in range(repeats + 1):
        for label, llm in llms.items():
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if repeat:
                yield label, time.perf_counter() - begin


if __name__ == "__main__":
    main()
