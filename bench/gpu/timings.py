"""Each kernel's time against the device's measured limits."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from bench.gpu.lines import Lines, Timing
from bench.gpu.shapes import Scale, linear_shapes
from bench.kernels import (
    Case,
    Ceilings,
    Shape,
    gpu_stream_cases,
    make_batch,
    seconds,
    write_kv_seconds,
)
from tools.kernels.testing import PagedBatch, shared_splits

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import backend_for


def attention_timings(scale: Scale, ceilings: Ceilings, lines: Lines) -> Iterator[Timing]:
    """Decode and prefill attention, and decode over a float8 cache."""
    device = scale.device
    backend = backend_for(device)
    for (name, shape), case in itertools.product(scale.shapes.items(), scale.cases):
        if not lines.begin(f"{case.name}, {name}"):
            continue
        batch = make_batch(case, shape, device)
        if device.type == "cpu":
            batch = batch.stored_by(backend)
        call = batch.call(backend, num_decodes=len(case.rows) if case.is_decode else 0)
        duration = seconds(call, device=device, budget_s=scale.budget_s)
        yield case_timing(name, shape, case, "quire", duration, ceilings)
        if case.is_decode and len(case.rows) in (1, 256) and device.type == "cuda":
            yield _float8_timing(name, shape, case, batch, scale, ceilings)


def _float8_timing(
    name: str, shape: Shape, case: Case, batch: PagedBatch, scale: Scale, ceilings: Ceilings
) -> Timing:
    options = AttentionOptions(k_scale=0.02, v_scale=0.02)
    cached = replace(
        batch,
        k_cache=(batch.k_cache.float() / options.k_scale).to(torch.float8_e4m3fn),
        v_cache=(batch.v_cache.float() / options.v_scale).to(torch.float8_e4m3fn),
    )
    backend = backend_for(scale.device)
    call = cached.call(backend, num_decodes=len(case.rows), options=options)
    duration = seconds(call, device=scale.device, budget_s=scale.budget_s)
    size = case.kv_bytes(shape) // 2
    return bytes_timing(name, f"{case.name}, float8", "quire", duration, size, ceilings)


def case_timing(
    shape_name: str, shape: Shape, case: Case, implementation: str, duration: float,
    ceilings: Ceilings,
) -> Timing:  # fmt: skip
    """Decodes against bytes, prefills against flops."""
    if case.is_decode:
        size = case.kv_bytes(shape)
        return bytes_timing(shape_name, case.name, implementation, duration, size, ceilings)
    flops = case.flops(shape) / duration
    return Timing(
        shape=shape_name,
        case=case.name,
        implementation=implementation,
        ms=duration * 1e3,
        rate=f"{flops / 1e12:.1f} TFLOP/s",
        share_of_limit=flops / ceilings.matmul_flops,
    )


def linear_timings(scale: Scale, ceilings: Ceilings, lines: Lines) -> Iterator[Timing]:
    """Each linear layer of the model, at few rows against its bytes, at many against its flops."""
    backend = backend_for(scale.device)
    for name, outputs, inputs in linear_shapes(scale):
        if not lines.begin(f"linear {name}"):
            continue
        weight = torch.randn(outputs, inputs, device=scale.device).to(scale.dtype) * 0.02
        layer = backend.pack_linear(weight)
        for rows in (1, 3) if scale.is_dry else (1, 8, 32, 64, 128, 256, 2048):
            x = torch.randn(rows, inputs, device=scale.device).to(scale.dtype)
            duration = seconds(partial(layer, x), device=scale.device, budget_s=scale.budget_s)
            size = weight.nbytes + x.nbytes * (inputs + outputs) // inputs
            flops = 2 * rows * outputs * inputs
            floor_s = max(size / ceilings.copy_bytes_per_s, flops / ceilings.matmul_flops)
            yield Timing(
                shape="Llama 8B",
                case=f"linear {name} {rows} x {inputs} -> {outputs}",
                implementation=backend.name,
                ms=duration * 1e3,
                rate=f"{size / duration / 1e9:.0f} GB/s, {flops / duration / 1e12:.1f} TFLOP/s",
                share_of_limit=floor_s / duration,
            )


def stream_timings(scale: Scale, ceilings: Ceilings, lines: Lines) -> Iterator[Timing]:
    """The kernels that memory limits."""
    device = scale.device
    backend = backend_for(device)
    counts = (1, 64) if scale.is_dry else (1, 64, 2048, 16384)
    for (name, shape), num_tokens in itertools.product(scale.shapes.items(), counts):
        if not lines.begin(f"write_kv {num_tokens}, {name}"):
            continue
        duration, size = write_kv_seconds(
            shape, num_tokens=num_tokens, backend=backend, device=device
        )
        yield bytes_timing(name, f"write_kv {num_tokens}", "quire", duration, size, ceilings)
    for name, shape in (
        dict(list(scale.shapes.items())[:2]).items() if device.type == "cuda" else ()
    ):
        for stream in gpu_stream_cases(shape, device):
            if not lines.begin(f"{stream.name}, {name}"):
                continue
            for implementation, call in {"quire": stream.kernel, "twin": stream.twin}.items():
                duration = seconds(call, device=device, budget_s=scale.budget_s)
                yield bytes_timing(
                    name, stream.name, implementation, duration, stream.num_bytes, ceilings
                )


def shared_timings(scale: Scale, ceilings: Ceilings, lines: Lines) -> Iterator[Timing]:
    """Decodes after a prefix that all share, read once or by each row: the same bytes counted."""
    device = scale.device
    backend = backend_for(device)
    lengths = ((2, 256),) if scale.is_dry else ((32, 2048), (128, 2048), (256, 8192))
    for (name, shape), (rows, prefix) in itertools.product(scale.shapes.items(), lengths):
        case = Case(
            name=f"decode {rows} x ({prefix} shared + 100)", rows=[(prefix + 100, 1)] * rows
        )
        if not lines.begin(f"{case.name}, {name}"):
            continue
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


def all_reduce_timings(scale: Scale, ceilings: Ceilings, lines: Lines) -> Iterator[Timing]:
    """One rank whose peers' words are there already: the kernel without links and waiting."""
    if scale.device.type == "cpu":
        return
    from tools.kernels.ranks import LocalRanks

    from quire.kernels.triton_all_reduce import all_reduce

    for size, num_tokens in itertools.product((2, 8), (1, 16)):
        if not lines.begin(f"all_reduce {num_tokens} x 4096, {size} ranks"):
            continue
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
