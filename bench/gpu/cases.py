"""Batches for timing and checking kernels, the clock, and the device's measured limits."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tools.kernels.testing import PagedBatch, paged_batch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The attention of one model."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of (tokens, queries) under a name."""

    name: str
    rows: list[tuple[int, int]]

    @property
    def is_decode(self) -> bool:
        return all(queries == 1 for _, queries in self.rows)

    def kv_bytes(self, shape: Shape) -> int:
        """Bytes of K and V of every row, read once."""
        tokens = sum(tokens for tokens, _ in self.rows)
        return 2 * tokens * shape.num_kv_heads * shape.head_size * shape.dtype.itemsize

    def flops(self, shape: Shape) -> int:
        """Two products of each query with each token that it attends to."""
        pairs = sum(q * (t - q) + q * (q + 1) // 2 for t, q in self.rows)
        return 4 * shape.num_heads * shape.head_size * pairs


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The device's measured peak rates."""

    copy_bytes_per_s: float
    """Read and written bytes together."""
    matmul_flops: float
    read_bytes_per_s: float = 0.0
    """A sum over a tensor: nothing is written. 0 where it was not measured."""


CPU_SHAPE = Shape(num_heads=12, num_kv_heads=4, head_size=64)
GPU_SHAPE = Shape(num_heads=32, num_kv_heads=8, head_size=128)
GPU_CASES = [
    *(
        Case(name=f"decode {rows} x {tokens}", rows=[(tokens, 1)] * rows)
        for rows, tokens in [
            *((1, 1024), (1, 8192), (1, 65536), (8, 4096)),
            *((32, 1024), (32, 8192), (256, 1024), (64, 4096)),
        ]
    ),
    Case(name="decode 63 x 512 + 32768", rows=[(512, 1)] * 63 + [(32768, 1)]),
    Case(name="prefill 512", rows=[(512, 512)]),
    Case(name="prefill 4 x 2048", rows=[(2048, 2048)] * 4),
    Case(name="prefill 16384", rows=[(16384, 16384)]),
    Case(name="prefill 512 after 7680", rows=[(8192, 512)]),
    Case(name="prefill 30 after 8192", rows=[(8222, 30)]),
    Case(name="prefill 30 after 65536", rows=[(65566, 30)]),
]


def seconds(call: Callable[[], object], *, device: torch.device, budget_s: float = 0.5) -> float:
    """The median duration of a call, over as many as fit the budget, three at least.

    On a GPU the call is captured as a graph, so that no launch is waited for, and replayed after
    256 MiB were read: as in a model, its data is not in the level-2 cache, and no dirty lines are
    left there to be written back while the clock runs. A call that cannot be captured is timed
    as it is.
    """
    call()
    time_once = _on_gpu(_captured(call), device) if _is_gpu(device) else _on_cpu(call)
    durations: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(durations) < 3 or (time.perf_counter() < deadline and len(durations) < 200):
        durations.append(time_once())
    return statistics.median(durations)


def _on_cpu(call: Callable[[], object]) -> Callable[[], float]:
    def time_once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return time_once


def _on_gpu(replay: Callable[[], object], device: torch.device) -> Callable[[], float]:
    flush = torch.ones(64 << 20, dtype=torch.float32, device=device)
    total = torch.zeros((), dtype=torch.float32, device=device)

    def time_once() -> float:
        torch.sum(flush, 0, out=total)
        before, after = _event(), _event()
        before.record()
        replay()
        after.record()
        torch.cuda.synchronize()
        return float(before.elapsed_time(after)) / 1e3

    time_once()
    return time_once


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Replays of the call's graph; the call itself where it waits for the device inside."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return call
    return graph.replay


def measure_ceilings(
    device: torch.device,
    *,
    dtype: torch.dtype,
    is_small: bool = False,
    budget_s: float = 0.5,
) -> Ceilings:
    """A copy and a sum too large for any cache, unless ``is_small``, and a square product."""
    size = (1 << 20) if is_small else (1 << 30) if _is_gpu(device) else (256 << 20)
    # Not zeros: a device may move and multiply those faster than other data.
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source), device=device, budget_s=budget_s)
    read_s = seconds(source.sum, device=device, budget_s=budget_s)
    n = 64 if is_small else 8192 if _is_gpu(device) else 1024
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    matmul_s = seconds(lambda: a @ b, device=device, budget_s=budget_s)
    return Ceilings(
        copy_bytes_per_s=2 * size / copy_s,
        matmul_flops=2 * n**3 / matmul_s,
        read_bytes_per_s=size / read_s,
    )


def make_batch(case: Case, shape: Shape, device: torch.device) -> PagedBatch:
    return paged_batch(
        case.rows,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        block_size=shape.block_size,
        dtype=shape.dtype,
        device=device,
    )


def sdpa_call(case: Case, batch: PagedBatch) -> Callable[[], Tensor] | None:
    """SDPA on dense tensors, or ``None`` where the rows differ and there is no dense tensor."""
    tokens, queries = case.rows[0]
    if any(row != (tokens, queries) for row in case.rows):
        return None
    k, v = (torch.stack(x).transpose(1, 2) for x in zip(*batch.dense_kv, strict=True))
    q = batch.q.view(len(case.rows), queries, *batch.q.shape[1:]).transpose(1, 2)
    is_whole = tokens == queries
    visible = None
    if not is_whole and queries > 1:
        visible = torch.ones(queries, tokens, dtype=torch.bool, device=q.device)
        visible = visible.tril(tokens - queries)
    return lambda: scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=is_whole and queries > 1, enable_gqa=True
    )


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
