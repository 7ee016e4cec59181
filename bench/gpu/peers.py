"""Attention of others on the same batches: PyTorch's SDPA by backend, flex_attention, FlashInfer
and flash_attn where they are installed.
"""

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
        calls["flex_attention, dense"] = lambda: flex_call(case, batch)
    calls["flashinfer, paged"] = lambda: flashinfer_call(case, batch)
    calls["flash_attn, dense"] = lambda: flash_attn_call(case, batch)
    return calls


def _sdpa_by(backend: SDPBackend, case: Case, batch: PagedBatch) -> Call | None:
    call = sdpa_call(case, batch)
    if call is None:
        return None

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return run


def flex_call(case: Case, batch: PagedBatch) -> Call | None:
    """flex_attention, compiled, on dense K and V."""
    tokens, queries = case.rows[0]
    if any(row != (tokens, queries) for row in case.rows):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    offset = tokens - queries
    mask = create_block_mask(
        lambda _b, _h, q, k: q + offset >= k, None, None, queries, tokens, device=batch.q.device
    )
    k, v = (torch.stack(x).transpose(1, 2) for x in zip(*batch.dense_kv, strict=True))
    q = batch.q.view(len(case.rows), queries, *batch.q.shape[1:]).transpose(1, 2)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)


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


def flash_attn_call(case: Case, batch: PagedBatch) -> Call | None:
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
