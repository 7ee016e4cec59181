"""Decode and prefill attention with other tiles than the shipped ones, in one run.

The shipped configuration (`quire.kernels.launch`) was chosen without a device. This part says
which one a device likes better; the one that wins is then written there by hand, since a tile
size decides the order of summation.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from bench.gpu.lines import Lines, Timing
from bench.gpu.shapes import Scale
from bench.gpu.timings import case_timing
from bench.kernels import Case, Ceilings, Shape, make_batch, seconds

from quire.kernels.backend import backend_for
from quire.kernels.launch import LaunchConfig, launch_config

DECODE_CASES = [
    Case(name=f"decode {rows} x {tokens}", rows=[(tokens, 1)] * rows)
    for rows, tokens in [(1, 8192), (32, 8192), (256, 1024)]
]
PREFILL_CASES = [
    Case(name="prefill 4 x 2048", rows=[(2048, 2048)] * 4),
    Case(name="prefill 30 after 8192", rows=[(8222, 30)]),
]
Change = dict[str, int]
DECODE_VARIANTS: list[Change] = [
    {},
    *({"num_stages": stages} for stages in (2, 3, 4, 5, 7)),
    *({"block_n": block_n} for block_n in (32, 64, 128)),
    *({"num_warps": warps} for warps in (2, 4, 8)),
    *({"block_n": 32, "num_stages": stages} for stages in (5, 7)),
    *({"SPLIT_TOKENS": split} for split in (512, 1024)),
]
PREFILL_VARIANTS: list[Change] = [
    {},
    *({"num_stages": stages} for stages in (1, 2, 3, 4)),
    *({"block_n": block_n, "num_stages": 2} for block_n in (32, 128)),
    *({"block_m": 64, "num_warps": warps} for warps in (4, 8)),
]


def variant_timings(scale: Scale, ceilings: Ceilings, lines: Lines) -> Iterator[Timing]:
    """Does nothing on a CPU, whose backend has other tiles."""
    if scale.device.type == "cpu":
        lines.fact("not run", "variants are those of the Triton kernels")
        return
    shape = next(iter(scale.shapes.values()))
    kinds = (
        ("decode", DECODE_VARIANTS, DECODE_CASES),
        ("prefill", PREFILL_VARIANTS, PREFILL_CASES),
    )
    for kernel, variants, cases in kinds:
        for change, case in itertools.product(variants, cases):
            told = ", ".join(f"{name} {value}" for name, value in change.items()) or "as shipped"
            if not lines.begin(f"{case.name}, {told}"):
                continue
            try:
                yield _timing(kernel, change, told, case, shape, scale, ceilings)
            except Exception as error:  # it may want more shared memory than there is
                lines.fact(
                    f"not run: {case.name}, {told}", f"{type(error).__name__}: {error}"[:200]
                )


def _timing(
    kernel: str, change: Change, told: str, case: Case, shape: Shape, scale: Scale,
    ceilings: Ceilings,
) -> Timing:  # fmt: skip
    from quire.kernels import triton_decode, triton_prefill

    modules: dict[str, Any] = {"decode": triton_decode, "prefill": triton_prefill}
    tile = {name: value for name, value in change.items() if name != "SPLIT_TOKENS"}

    def changed(*arguments: Any, **options: Any) -> LaunchConfig:
        return replace(launch_config(*arguments, **options), **tile)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(modules[kernel], "launch_config", changed))
        if "SPLIT_TOKENS" in change:
            split = change["SPLIT_TOKENS"]
            stack.enter_context(mock.patch.object(modules[kernel], "SPLIT_TOKENS", split))
        batch = make_batch(case, shape, scale.device)
        call = batch.call(
            backend_for(scale.device), num_decodes=len(case.rows) if case.is_decode else 0
        )
        duration = seconds(call, device=scale.device, budget_s=scale.budget_s)
    return case_timing("variants", shape, case, told, duration, ceilings)
