"""Times other attention kernels on the same batches: PyTorch's SDPA by backend, and FlashInfer."""

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch
from bench.gpu.cases import Case, make_batch, sdpa_call
from bench.gpu.timings import Timer
from tools.kernels.testing import PagedBatch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], Any]
_SDPA = {
    "SDPA flash, dense": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN, dense": SDPBackend.CUDNN_ATTENTION,
    "SDPA math, dense": SDPBackend.MATH,
}


def peer_timings(timer: Timer) -> None:
    """A peer that cannot do a case is a fact and no fault."""
    shapes = itertools.islice(timer.scale.shapes.items(), 2)
    for (name, shape), case in itertools.product(shapes, timer.scale.cases):
        batch = make_batch(case, shape, timer.scale.device)
        for implementation, make in _calls(case, batch).items():
            what = f"{implementation}, {case.name}, {name}"
            if not timer.lines.begin(what):
                continue
            try:
                call = make()
                if call is not None:
                    timer.time_case(name, shape, case, implementation, call)
            except Exception as error:
                timer.lines.not_run(what, error)


def _calls(case: Case, batch: PagedBatch) -> dict[str, Callable[[], Call | None]]:
    calls: dict[str, Callable[[], Call | None]] = {"SDPA, dense": lambda: sdpa_call(case, batch)}
    if batch.q.is_cuda:
        for name, backend in _SDPA.items():
            calls[name] = lambda backend=backend: _sdpa_by(backend, case, batch)  # type: ignore[misc]
    calls["flashinfer, paged"] = lambda: flashinfer_call(case, batch)
    return calls


def _sdpa_by(backend: SDPBackend, case: Case, batch: PagedBatch) -> Call | None:
    call = sdpa_call(case, batch)
    if call is None:
        return None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def flashinfer_call(case: Case, batch: PagedBatch) -> Call | None:
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


def _ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
