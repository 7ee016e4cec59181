"""Times decode and prefill attention with other tile sizes than the shipped ones.

The shipped configuration (`quire.kernels.triton.launch`) was chosen without a device. This part
shows which one is faster on a device; the fastest is then written there by hand, since a tile size
determines the order of summation.
"""

import itertools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

from bench.gpu.cases import Case, make_batch
from bench.gpu.timings import Timer

from quire.kernels.backend import backend_for
from quire.kernels.triton.launch import LaunchConfig, launch_config

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


def variant_timings(timer: Timer) -> None:
    """Does nothing on a CPU, whose backend has other tiles."""
    lines = timer.lines
    if timer.scale.device.type == "cpu":
        lines.fact("not run", "variants are those of the Triton kernels")
        return
    from quire.kernels.triton import decode as triton_decode
    from quire.kernels.triton import prefill as triton_prefill

    kinds: tuple[tuple[Any, list[Change], list[Case]], ...] = (
        (triton_decode, DECODE_VARIANTS, DECODE_CASES),
        (triton_prefill, PREFILL_VARIANTS, PREFILL_CASES),
    )
    for module, variants, cases in kinds:
        for change, case in itertools.product(variants, cases):
            told = ", ".join(f"{name} {value}" for name, value in change.items()) or "as shipped"
            if not lines.begin(f"{case.name}, {told}"):
                continue
            try:
                _time(timer, module, change, told, case)
            except Exception as error:  # it may want more shared memory than there is
                lines.not_run(f"{case.name}, {told}", error)


def _time(timer: Timer, module: Any, change: Change, told: str, case: Case) -> None:
    shape, device = next(iter(timer.scale.shapes.values())), timer.scale.device
    tile = {name: value for name, value in change.items() if name != "SPLIT_TOKENS"}

    def changed(*arguments: Any, **options: Any) -> LaunchConfig:
        return replace(launch_config(*arguments, **options), **tile)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "launch_config", changed))
        if "SPLIT_TOKENS" in change:
            split = change["SPLIT_TOKENS"]
            stack.enter_context(mock.patch.object(module, "SPLIT_TOKENS", split))
        num_decodes = len(case.rows) if case.is_decode else 0
        batch = make_batch(case, shape, device)
        call = batch.call(backend_for(device), num_decodes=num_decodes)
        timer.time_case("variants", shape, case, told, call)
