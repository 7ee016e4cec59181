"""What the order of prompts costs a batch, and brings those who wait.

    python bench/prompt_order.py MODEL [--requests 128] [--rounds 3] [--kv-gb 2]

Runs the same prompts with each ``scheduling_policy`` in turn: equal ones that share a prefix, equal
ones that do not, and mixed lengths (16 to 1,500 tokens, short ones more often). Prints output
tokens a second, and the mean time from the beginning to a request's first token, the medians over
the rounds, and the ratio of the two policies.
"""

import argparse
import time
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import get_args

import numpy as np

from quire.llm import LLM
from quire.worker.config import SchedulingPolicy
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams

NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gb", type=float, default=1.0, help="KV cache of each engine")
    arguments = parser.parse_args()
    policies = get_args(SchedulingPolicy)
    engines = {
        policy: LLM(
            arguments.model,
            scheduling_policy=policy,
            kv_cache_memory_bytes=int(arguments.kv_gb * 2**30),
        )
        for policy in policies
    }
    for workload in ("shared", "apart", "mixed"):
        rates: dict[str, list[float]] = {policy: [] for policy in policies}
        waits: dict[str, list[float]] = {policy: [] for policy in policies}
        for number in range(arguments.rounds + 1):
            prompts = _prompts(workload, arguments.requests, seed=number)
            for policy in policies if number % 2 else policies[::-1]:
                rate, wait_s = _run(engines[policy], prompts)
                if number:  # The first round warms up.
                    rates[policy].append(rate)
                    waits[policy].append(wait_s)
        for policy in policies:
            rate, wait_s = median(rates[policy]), median(waits[policy])
            print(f"{workload:>7} {policy:>17} {rate:9.0f} tokens/s {wait_s:8.3f} s to first token")
        first, last = policies
        print(
            f"{workload:>7} {last} ÷ {first}: tokens/s "
            f"{median(rates[last]) / median(rates[first]):.3f}, time to first token "
            f"{median(waits[last]) / median(waits[first]):.3f}\n",
            flush=True,
        )
    for engine in engines.values():
        engine.close()


def _prompts(workload: str, count: int, *, seed: int) -> list[list[int]]:
    rng = Random(f"{workload}/{seed}")
    prefix = _tokens(rng, 768) if workload == "shared" else []
    lengths = {"shared": 48, "apart": 816}
    return [
        prefix + _tokens(rng, lengths.get(workload) or round(16 * (1500 / 16) ** rng.random()))
        for _ in range(count)
    ]


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(3, 2_000) for _ in range(count)]


def _run(llm: LLM, prompts: list[list[int]]) -> tuple[float, float]:
    """Output tokens a second, and the mean time to a first token."""
    llm.reset_prefix_cache()
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=np.array(prompt, dtype=np.uint32),
                params=params,
            )
        )
    first_s: list[float] = []
    while engine.has_work:
        deltas = engine.step()
        now_s = time.perf_counter() - began
        first_s += [now_s] * sum(delta.token_offset == 0 for delta in deltas)
    return len(prompts) * NEW_TOKENS / now_s, fmean(first_s)


if __name__ == "__main__":
    main()
