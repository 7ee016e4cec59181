"""How long the engine's own work in a step takes while thousands wait for one shared prefix.

    python -m bench.followers [--waiting 0,1000,10000] [--steps N] [--shared TOKENS] [--rounds N]

The executor computes nothing, so a step is scheduling, block tables and step input alone. Requests
share a prefix that one of them computes, in chunks, and differ in their last 48 tokens.
"""

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import get_args

import numpy as np
from bench.direct_executor import DirectExecutor

from quire.worker.api.config import EngineConfig, SchedulingPolicy
from quire.worker.api.hashing import TokenIds
from quire.worker.api.request import Prepared
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.engine import Engine
from quire.worker.model.facts import ModelFacts
from quire.worker.step.messages import StepInput, StepOutput

OWN, OUTPUT = 48, 64


class Nothing(DirectExecutor):
    """Every next token is 7."""

    num_blocks = 65_536

    def execute(self, step: StepInput) -> StepOutput:
        return StepOutput(step.sampling.with_given(np.full(len(step.samples_S), 7)), ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", default="0,1000,10000")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shared", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print("| policy | waiting | longest step, ms | median step, ms |\n|---|---|---|---|")
    for policy in get_args(SchedulingPolicy):
        for waiting in map(int, arguments.waiting.split(",")):
            rounds = [
                _steps(policy, waiting, num_steps=arguments.steps, num_shared=arguments.shared)
                for _ in range(arguments.rounds)
            ]
            longest = statistics.median(max(times) for times in rounds)
            median = statistics.median(statistics.median(times) for times in rounds)
            print(f"| {policy} | {waiting:,} | {1e3 * longest:.2f} | {1e3 * median:.2f} |")


def _steps(
    policy: SchedulingPolicy, num_waiting: int, *, num_steps: int, num_shared: int
) -> list[float]:
    """Seconds of each step. Thirty-two requests decode already when the others come."""
    config = EngineConfig(
        model=Path("none"), scheduling_policy=policy, max_num_waiting=num_waiting + 64
    )
    facts = ModelFacts(
        name="nothing",
        fingerprint="nothing",
        vocab_size=32_000,
        max_model_len=32_768,
        eos_token_ids=(),
        kv_dtype="float32",
    )
    engine = Engine(config, facts, Nothing())
    rng = np.random.default_rng(0)
    shared = _tokens(rng, num_shared)
    for number in range(32):
        engine.add_request(_request(f"before {number}", _tokens(rng, 16), 4096))
    for _ in range(4):
        engine.step()
    # One more than those that follow it; where none shall wait, another prompt is computed.
    for number in range(num_waiting + 1):
        tokens = np.concatenate([shared, _tokens(rng, OWN)])
        engine.add_request(_request(str(number), tokens, OUTPUT))
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(num_steps):
        begin_s = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin_s)
    gc.unfreeze()
    return times


def _tokens(rng: np.random.Generator, number: int) -> TokenIds:
    return rng.integers(3, 32_000, number, dtype=np.uint32)


def _request(request_id: str, token_ids: TokenIds, max_tokens: int) -> Prepared:
    token_ids.flags.writeable = False
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    return Prepared(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling)


if __name__ == "__main__":
    main()
