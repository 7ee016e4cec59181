"""Times each kernel, and compares it to the device's measured limits."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from bench.gpu.cases import Case, Ceilings, Shape, make_batch, measure_ceilings, seconds
from bench.gpu.lines import Lines, fact
from bench.gpu.shapes import Scale, linear_shapes
from bench.gpu.streams import stream_cases
from tools.kernels.testing import shared_splits

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import backend_for


class Timer:
    """Times the calls of one part of a run and writes each time as a line at once."""

    def __init__(self, scale: Scale, lines: Lines, *, share: int = 0, num_shares: int = 1) -> None:
        self.scale = scale
        self.lines = lines
        self.share = share
        """Which of ``num_shares`` equal parts of the work this process has."""
        self.num_shares = num_shares

    @cached_property
    def ceilings(self) -> Ceilings:
        """Those of this run; without them, as where one part is run by hand, measured now."""
        known: dict[str, Any] | None = fact(self.lines.read(), "ceilings")
        return self.measured_ceilings() if known is None else Ceilings(**known)

    def measured_ceilings(self) -> Ceilings:
        scale = self.scale
        return measure_ceilings(
            scale.device, dtype=scale.dtype, is_small=scale.is_dry, budget_s=scale.budget_s
        )

    def seconds(self, call: Callable[[], object]) -> float:
        return seconds(call, device=self.scale.device, budget_s=self.scale.budget_s)

    def time_bytes(
        self, shape: str, case: str, implementation: str, call: Callable[[], object], size: int
    ) -> None:
        """A call that must move ``size`` bytes, beside a copy of as many."""
        duration = self.seconds(call)
        self.lines.timing(
            shape,
            case,
            implementation,
            seconds=duration,
            rate=f"{size / duration / 1e9:.1f} GB/s",
            floor_s=size / self.ceilings.copy_bytes_per_s,
        )

    def time_case(
        self,
        name: str,
        shape: Shape,
        case: Case,
        implementation: str,
        call: Callable[[], object],
    ) -> None:
        """Attention: decodes against bytes, prefills against flops."""
        if case.is_decode:
            self.time_bytes(name, case.name, implementation, call, case.kv_bytes(shape))
            return
        duration, flops = self.seconds(call), case.flops(shape)
        self.lines.timing(
            name,
            case.name,
            implementation,
            seconds=duration,
            rate=f"{flops / duration / 1e12:.1f} TFLOP/s",
            floor_s=flops / self.ceilings.matmul_flops,
        )


def attention_timings(timer: Timer) -> None:
    """Decode and prefill attention, and decode over a float8 cache."""
    scale, device = timer.scale, timer.scale.device
    backend = backend_for(device)
    for (name, shape), case in itertools.product(scale.shapes.items(), scale.cases):
        if not timer.lines.begin(f"{case.name}, {name}"):
            continue
        batch = make_batch(case, shape, device)
        if device.type == "cpu":
            batch = batch.stored_by(backend)
        num_decodes = len(case.rows) if case.is_decode else 0
        timer.time_case(name, shape, case, "quire", batch.call(backend, num_decodes=num_decodes))
        if num_decodes in (1, 256) and device.type == "cuda":
            options = AttentionOptions(k_scale=0.02, v_scale=0.02)
            cached = replace(
                batch,
                k_cache=(batch.k_cache.float() / options.k_scale).to(torch.float8_e4m3fn),
                v_cache=(batch.v_cache.float() / options.v_scale).to(torch.float8_e4m3fn),
            )
            call = cached.call(backend, num_decodes=num_decodes, options=options)
            size = case.kv_bytes(shape) // 2
            timer.time_bytes(name, f"{case.name}, float8", "quire", call, size)


def linear_timings(timer: Timer) -> None:
    """Each linear layer of the model, at few rows against its bytes, at many against its flops."""
    scale, ceilings = timer.scale, timer.ceilings
    backend = backend_for(scale.device)
    for name, outputs, inputs in linear_shapes(scale):
        if not timer.lines.begin(f"linear {name}"):
            continue
        weight = torch.randn(outputs, inputs, device=scale.device).to(scale.dtype) * 0.02
        layer = backend.pack_linear(weight)
        for rows in (1, 3) if scale.is_dry else (1, 8, 32, 64, 128, 256, 2048):
            x = torch.randn(rows, inputs, device=scale.device).to(scale.dtype)
            duration = timer.seconds(partial(layer, x))
            size = weight.nbytes + x.nbytes * (inputs + outputs) // inputs
            flops = 2 * rows * outputs * inputs
            timer.lines.timing(
                "Llama 8B",
                f"linear {name} {rows} x {inputs} -> {outputs}",
                backend.name,
                seconds=duration,
                rate=f"{size / duration / 1e9:.0f} GB/s, {flops / duration / 1e12:.1f} TFLOP/s",
                floor_s=max(size / ceilings.copy_bytes_per_s, flops / ceilings.matmul_flops),
            )


def stream_timings(timer: Timer) -> None:
    """Times the memory-bound kernels."""
    scale, device = timer.scale, timer.scale.device
    backend = backend_for(device)
    counts = (1, 64) if scale.is_dry else (1, 64, 2048, 16384)
    for (name, shape), num_tokens in itertools.product(scale.shapes.items(), counts):
        if not timer.lines.begin(f"write_kv {num_tokens}, {name}"):
            continue
        size = (num_tokens, shape.num_kv_heads, shape.head_size)
        k, v = torch.randn(2, *size, device=device).to(shape.dtype)
        num_blocks = 2 * -(-num_tokens // shape.block_size)
        cache_size = (2, num_blocks, shape.block_size, *size[1:])
        k_cache, v_cache = torch.zeros(cache_size, dtype=shape.dtype, device=device)
        slots = torch.randperm(num_blocks * shape.block_size, device=device)[:num_tokens]
        call = partial(backend.write_kv, k, v, k_cache, v_cache, slots)
        num_bytes = 4 * k.nbytes + slots.nbytes
        timer.time_bytes(name, f"write_kv {num_tokens}", "quire", call, num_bytes)
    if device.type == "cpu":
        return
    for name, shape in list(scale.shapes.items())[:2]:
        for stream in stream_cases(shape, device):
            if timer.lines.begin(f"{stream.name}, {name}"):
                timer.time_bytes(name, stream.name, "quire", stream.kernel, stream.num_bytes)
                timer.time_bytes(name, stream.name, "twin", stream.twin, stream.num_bytes)


def shared_timings(timer: Timer) -> None:
    """Decodes after a prefix that all share, read once or by each row: the same bytes counted."""
    scale, device = timer.scale, timer.scale.device
    backend = backend_for(device)
    lengths = ((2, 256),) if scale.is_dry else ((32, 2048), (128, 2048), (256, 8192))
    for (name, shape), (rows, prefix) in itertools.product(scale.shapes.items(), lengths):
        case = Case(
            name=f"decode {rows} x ({prefix} shared + 100)", rows=[(prefix + 100, 1)] * rows
        )
        if not timer.lines.begin(f"{case.name}, {name}"):
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
            timer.time_bytes(name, case.name, implementation, call, distinct)
