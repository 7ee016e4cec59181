"""Computes a lower bound of a workload's time on this machine, from three rates measured with it.

A workload is a prefill and, where more than one token is wanted, ``new_tokens - 1`` decode steps.
With n new tokens for each of N requests, S shared and O own prompt tokens, weights W in the
layers' matrices and H in the LM head, q = heads * head size, and L layers:

    prefill     tokens  T = S + N * O, or N * O after a hit
                GEMM    2 * W * T + 2 * H * N                          flop
                attend  4 * q * L * (sum over tokens of those seen)    flop
    one decode  GEMM    2 * (W + H) * N                                flop
                attend  4 * q * L * N * (tokens of the context)        flop

    time = max(GEMM / gemm rate, bytes of W + H / read rate) + attend / attention rate

Weights that the last level of cache holds are read at its rate, others at that of DRAM.
The shared prefix is computed once. Attention cannot run at the rate of a large GEMM: its products
are short and wait for exp; `ATTENTION_SHARE` of the GEMM rate is what the best kernel tried on an
AVX-512 machine came near. Attention counts
whole contexts, also where a layer has a window (Gemma's would spare a few percent here). Reading K
and V is not counted, nor are norms, sampling and everything between the kernels: a floor to stand
above, not one to reach.
"""

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.checkpoints import Shape
from bench.peers.workloads import Workload

ATTENTION_SHARE = 0.8
BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Peak rates of this machine, with the engines' number of threads."""

    gemm_flops: dict[str, float]
    """Flop/s of a large matrix product by dtype."""
    dram_bytes_per_s: float
    """Reading an array that no cache holds."""
    cache_bytes: int = 0
    """Size of the last level of cache."""
    cache_bytes_per_s: float = 0.0
    """Reading an array that nearly fills it."""

    def best(self, other: "Limits") -> "Limits":
        """The higher rate of two measurements: a disturbance only makes a probe slower."""
        return Limits(
            gemm_flops={
                name: max(rate, other.gemm_flops[name]) for name, rate in self.gemm_flops.items()
            },
            dram_bytes_per_s=max(self.dram_bytes_per_s, other.dram_bytes_per_s),
            cache_bytes=self.cache_bytes,
            cache_bytes_per_s=max(self.cache_bytes_per_s, other.cache_bytes_per_s),
        )

    def read_s(self, num_bytes: int) -> float:
        """The least time to read ``num_bytes`` bytes repeatedly."""
        cached = num_bytes <= self.cache_bytes
        return num_bytes / (self.cache_bytes_per_s if cached else self.dram_bytes_per_s)


def floor_seconds(workload: Workload, shape: Shape, limits: Limits) -> float | None:
    """``None`` for a start of a process, which has no floor worth the name, for int8, whose
    products no library at hand does at the machine's rate, and for experts, as it depends on the
    router which of them are read."""
    if workload.fresh_process or workload.dtype not in BYTES or shape.num_experts:
        return None
    gemm = limits.gemm_flops[workload.dtype]
    num, shared, own = workload.num_requests(shape), workload.shared, workload.own
    attend_flops = 4 * shape.num_heads * shape.head_size * shape.num_layers
    weights = shape.layer_weights + shape.head_weights
    read_s = limits.read_s(weights * BYTES[workload.dtype])

    new = num * own + (0 if workload.cached else shared)
    seen = num * _pairs(shared, own) + (0 if workload.cached else _pairs(0, shared))
    flops = 2 * shape.layer_weights * new + 2 * shape.head_weights * num
    seconds = max(flops / gemm, read_s) + seen * attend_flops / (gemm * ATTENTION_SHARE)

    steps = workload.new_tokens - 1
    seen = num * _pairs(shared + own, steps)
    step_s = max(2 * weights * num / gemm, read_s)
    return seconds + steps * step_s + seen * attend_flops / (gemm * ATTENTION_SHARE)


def measure_limits(*, num_threads: int) -> Limits:
    """Runs the probes: about six seconds, on ``num_threads`` threads."""
    import torch

    torch.set_num_threads(num_threads)
    size = 2048
    rates = {}
    for name in BYTES:
        a, b = torch.randn(2, size, size).to(getattr(torch, name))
        rates[name] = 2 * size**3 / _best_seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    # Of a sum, numpy's minima and maxima and a GEMM of one row, the sum read fastest; without huge
    # pages it reads at half the rate.
    size = 1 << 30
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    cache_bytes = _last_cache_bytes()
    part = array[: cache_bytes // 4 * 9 // 10]
    return Limits(
        gemm_flops=rates,
        dram_bytes_per_s=size / _best_seconds(array.sum),
        cache_bytes=cache_bytes,
        cache_bytes_per_s=part.nbytes / _best_seconds(part.sum) if cache_bytes else 0.0,
    )


def _last_cache_bytes() -> int:
    """0 where it is not known. sysconf's figure is that of the host in some virtual machines."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(file.read_text().strip().removesuffix("K")) << 10 for file in sizes), default=0)


def _pairs(before: int, count: int) -> int:
    """Tokens seen by ``count`` tokens behind ``before`` others, each seeing itself."""
    return count * before + count * (count + 1) // 2


def _best_seconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
