"""What a step costs around the model: scheduling, block pool, step input, taking the tokens.

    python bench/step_overhead.py [--sequences 128] [--context 1024] [--steps 400] [--device-ms 5]

The executor answers at once, so that all time is the engine's own. Prints microseconds per step:
the median and the 95th percentile of decode steps, and of steps that also prefill one chunk. Then
the same decodes on a device that takes its time and none of the CPU's, with each step prepared
when the one before it has run and while it runs.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from quire.worker.config import EngineConfig
from quire.worker.engine import Engine
from quire.worker.executor import DirectExecutor
from quire.worker.model_facts import ModelFacts
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams
from quire.worker.step import Executor, StepInput, StepOutput

VOCAB_SIZE = 32_000
CHUNK = 2048


class DeviceExecutor:
    """Sleeps for each step, one after the other, in a thread: what a GPU is to the CPU."""

    def __init__(self, num_blocks: int, *, step_s: float, num_ahead: int) -> None:
        self.num_blocks = num_blocks
        self.num_ahead = num_ahead
        self._step_s = step_s
        self._device = ThreadPoolExecutor(1)
        self._results: deque[Future[StepOutput]] = deque()

    def submit(self, step: StepInput) -> None:
        self._results.append(self._device.submit(self._run, len(step.sample_rows_S)))

    def result(self) -> StepOutput:
        return self._results.popleft().result()

    def close(self) -> None:
        self._device.shutdown()

    def _run(self, num_sampled: int) -> StepOutput:
        time.sleep(self._step_s)
        return StepOutput(np.full(num_sampled, 7, dtype=np.int64))


class InstantExecutor(DirectExecutor):
    """Samples token 7 everywhere, and takes no time over it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks

    def execute(self, step: StepInput) -> StepOutput:
        return StepOutput(np.full(len(step.sample_rows_S), 7, dtype=np.int64))

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each sequence")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device-ms", type=float, default=5.0, help="a step of the slow device")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    engine = _decoding(args, rng, InstantExecutor)
    _report(f"{args.sequences} decodes", _time_steps(engine, args.steps))

    chunks = args.steps // 4
    engine.add_request(_request("prefill", rng, chunks * CHUNK, 1))
    _report(f"{args.sequences - 1} decodes and a chunk", _time_steps(engine, chunks - 10))

    for num_ahead in (0, 1):
        step_s = args.device_ms / 1e3
        device = partial(DeviceExecutor, step_s=step_s, num_ahead=num_ahead)
        engine = _decoding(args, rng, device)
        _report(
            f"on a device of {args.device_ms:g} ms, {num_ahead} ahead",
            _time_steps(engine, args.steps // 2),
        )
        engine.close()


def _decoding(
    args: argparse.Namespace, rng: np.random.Generator, executor: Callable[[int], Executor]
) -> Engine:
    """An engine whose next steps are decodes of all sequences."""
    engine = _engine(args.sequences, args.context, args.steps, executor)
    for number in range(args.sequences):
        engine.add_request(_request(f"decode-{number}", rng, args.context, args.steps * 3))
    while engine.stats().num_pending_prefill_tokens:
        engine.step()
    return engine


def _engine(num_seqs: int, context: int, steps: int, executor: Callable[[int], Executor]) -> Engine:
    num_tokens = num_seqs * (context + 3 * steps) + steps * CHUNK
    return Engine(
        EngineConfig(
            model=Path("none"),
            max_num_seqs=num_seqs + 1,
            max_num_batched_tokens=num_seqs + CHUNK,
        ),
        ModelFacts(
            name="none",
            fingerprint="none",
            vocab_size=VOCAB_SIZE,
            max_model_len=num_tokens,
            eos_token_ids=(2,),
            kv_dtype="float32",
        ),
        executor(num_tokens // 16 + 1),
    )


def _request(
    request_id: str, rng: np.random.Generator, num_tokens: int, max_tokens: int
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=rng.integers(3, VOCAB_SIZE, num_tokens).astype(np.uint32),
        params=SamplingParams(max_tokens=max_tokens),
    )


def _time_steps(engine: Engine, num_steps: int) -> list[float]:
    """Microseconds of each of ``num_steps`` steps."""
    times = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def _report(what: str, times: list[float]) -> None:
    median, p95 = np.percentile(times, [50, 95])
    print(f"{what:32} median {median:7.0f} µs   p95 {p95:7.0f} µs")


if __name__ == "__main__":
    main()
