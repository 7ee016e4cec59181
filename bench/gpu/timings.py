"""Each kernel's time, beside PyTorch's SDPA, flashinfer and flash_attn where these are there."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench.gpu.shapes import Scale
from bench.kernels import (
    Case,
    Ceilings,
    gpu_stream_cases,
    make_batch,
    sdpa_call,
    seconds,
    write_kv_seconds,
)
from torch import Tensor

from quire.kernels.backend import backend_for
from quire.kernels.testing import PagedBatch, shared_splits


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One line of the table."""

    shape: str
    case: str
    implementation: str
    ms: float
    rate: str
    """Bytes or flops a second, or tokens, with their unit."""
    share_of_limit: float | None
    """Of the measured copy or matrix product, or of a floor made from these."""


def attention_timings(scale: Scale, ceilings: Ceilings) -> Iterator[Timing]:
    device = scale.device
    backend = backend_for(device)
    for (name, shape), case in itertools.product(scale.shapes.items(), scale.cases):
        batch = make_batch(case, shape, device)
        if device.type == "cpu":
            batch = batch.stored_by(backend)
        num_decodes = len(case.rows) if case.is_decode else 0
        calls: dict[str, Callable[[], Any] | None] = {
            "quire": batch.call(backend, num_decodes=num_decodes),
            "torch SDPA, dense": sdpa_call(case, batch),
            "flashinfer, paged": flashinfer_call(case, batch),
            "flash_attn, dense": flash_attn_call(case, batch),
        }
        for implementation, call in calls.items():
            if call is None:
                continue
            try:
                duration = seconds(call, device=device, budget_s=scale.budget_s)
            except Exception as error:  # a peer that cannot do a case is not our failure
                if implementation == "quire":
                    raise
                print(f"{implementation}, {case.name}: {type(error).__name__}: {error}")
                continue
            if case.is_decode:
                yield bytes_timing(name, case.name, implementation, duration,
                                   case.kv_bytes(shape), ceilings)  # fmt: skip
                continue
            flops = case.flops(shape) / duration
            yield Timing(
                shape=name,
                case=case.name,
                implementation=implementation,
                ms=duration * 1e3,
                rate=f"{flops / 1e12:.1f} TFLOP/s",
                share_of_limit=flops / ceilings.matmul_flops,
            )


def stream_timings(scale: Scale, ceilings: Ceilings) -> Iterator[Timing]:
    """The kernels that memory limits."""
    device = scale.device
    backend = backend_for(device)
    counts = (1, 64) if scale.is_dry else (1, 64, 2048, 16384)
    for (name, shape), num_tokens in itertools.product(scale.shapes.items(), counts):
        duration, size = write_kv_seconds(
            shape, num_tokens=num_tokens, backend=backend, device=device
        )
        yield bytes_timing(name, f"write_kv {num_tokens}", "quire", duration, size, ceilings)
    for name, shape in scale.shapes.items() if device.type == "cuda" else ():
        for stream in gpu_stream_cases(shape, device):
            for implementation, call in {"quire": stream.kernel, "twin": stream.twin}.items():
                duration = seconds(call, device=device, budget_s=scale.budget_s)
                yield bytes_timing(
                    name, stream.name, implementation, duration, stream.num_bytes, ceilings
                )


def shared_timings(scale: Scale, ceilings: Ceilings) -> Iterator[Timing]:
    """Decodes after a prefix that all share, read once or by each row: the same bytes counted."""
    device = scale.device
    backend = backend_for(device)
    lengths = ((2, 256),) if scale.is_dry else ((32, 2048), (128, 2048), (256, 8192))
    for (name, shape), (rows, prefix) in itertools.product(scale.shapes.items(), lengths):
        case = Case(
            name=f"decode {rows} x ({prefix} shared + 100)", rows=[(prefix + 100, 1)] * rows
        )
        batch = make_batch(case, shape, device)
        tables = batch.block_tables
        tables[:, : prefix // shape.block_size] = tables[0, : prefix // shape.block_size]
        if device.type == "cpu":
            batch = batch.stored_by(backend)
        distinct = Case(name="", rows=[(prefix + 100 * rows, 1)]).kv_bytes(shape)
        ways = {"quire, each row": None, "quire, once": shared_splits(batch, num_decodes=rows)}
        for implementation, shared in ways.items():
            call = batch.call(backend, num_decodes=rows, shared=shared)
            duration = seconds(call, device=device, budget_s=scale.budget_s)
            yield bytes_timing(name, case.name, implementation, duration, distinct, ceilings)


def all_reduce_timings(scale: Scale, ceilings: Ceilings) -> Iterator[Timing]:
    """One rank whose peers' words are there already: the kernel without links and waiting."""
    if scale.device.type == "cpu":
        return
    from quire.kernels.testing_ranks import LocalRanks
    from quire.kernels.triton_all_reduce import all_reduce

    for size, num_tokens in itertools.product((2, 8), (1, 16)):
        ranks = LocalRanks(size, torch.bfloat16, scale.device)
        x = torch.randn(num_tokens, 4096, device=scale.device).bfloat16()
        ranks.flags[0] = 1 << 30
        call = partial(all_reduce, x, ranks.peers[0])
        duration = seconds(call, device=scale.device, budget_s=scale.budget_s)
        yield bytes_timing(
            f"{size} ranks", f"all_reduce {num_tokens} x 4096, no links", "quire",
            duration, (size + 3) * x.nbytes, ceilings,
        )  # fmt: skip


def bytes_timing(
    shape: str, case: str, implementation: str, duration: float, size: int, ceilings: Ceilings
) -> Timing:
    rate = size / duration
    return Timing(
        shape=shape,
        case=case,
        implementation=implementation,
        ms=duration * 1e3,
        rate=f"{rate / 1e9:.1f} GB/s",
        share_of_limit=rate / ceilings.copy_bytes_per_s,
    )


def flashinfer_call(case: Case, batch: PagedBatch) -> Callable[[], Any] | None:
    """flashinfer on the same paged cache, planned before the clock starts."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    import flashinfer

    device, block_size = batch.q.device, batch.k_cache.shape[1]
    num_heads, head_size = batch.q.shape[1:]
    counts = [-(-tokens // block_size) for tokens, _ in case.rows]
    kv_starts = _ints([0, *itertools.accumulate(counts)], device)
    blocks = torch.cat(
        [table[:count] for table, count in zip(batch.block_tables, counts, strict=True)]
    )
    last_lens = _ints([(tokens - 1) % block_size + 1 for tokens, _ in case.rows], device)
    heads = (num_heads, batch.k_cache.shape[2], head_size, block_size)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
    dtypes = {"q_data_type": batch.q.dtype, "kv_data_type": batch.q.dtype}
    if case.is_decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(kv_starts, blocks, last_lens, *heads, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        query_starts = _ints(batch.query_starts, device)
        wrapper.plan(query_starts, kv_starts, blocks, last_lens, *heads, causal=True, **dtypes)
    return lambda: wrapper.run(batch.q, (batch.k_cache, batch.v_cache))


def flash_attn_call(case: Case, batch: PagedBatch) -> Callable[[], Any] | None:
    """flash_attn on dense K and V: its paged cache wants blocks of 256 tokens."""
    tokens, queries = case.rows[0]
    alike = all(row == (tokens, queries) for row in case.rows)
    if importlib.util.find_spec("flash_attn") is None or not alike:
        return None
    from flash_attn import flash_attn_func

    k, v = (torch.stack(x) for x in zip(*batch.dense_kv, strict=True))
    q = batch.q.view(len(case.rows), queries, *batch.q.shape[1:])
    return lambda: flash_attn_func(q, k, v, causal=True)


def _ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
