"""One part of `bench.gpu.run`, in this process: a fault ends it and no other.

    python -m bench.gpu.part NAME --out DIR [--dry] [--only CASE] [--share I/N]

`bench.gpu.run` starts it; by hand it repeats one part, or one case of it, for instance under
``compute-sanitizer``.
"""

import importlib
import itertools
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench.gpu.cases import Ceilings, measure_ceilings
from bench.gpu.checks import check_kernels, check_one
from bench.gpu.lines import Lines, fact, read_lines
from bench.gpu.shapes import Scale, check_fits, dry_scale, full_scale, memory_plan
from bench.gpu.timings import Timer
from bench.provenance import commit, cpu
from bench.report import command

from quire.kernels.products import make_batch_invariant

_H100_BYTES = int(79.65 * 2**30)
TIMED = {
    "model": "model.model_timings",
    "free_model": "model.model_timings",
    "attention": "timings.attention_timings",
    "linear": "timings.linear_timings",
    "streams": "timings.stream_timings",
    "shared": "timings.shared_timings",
    "variants": "variants.variant_timings",
    "peers": "peers.peer_timings",
}
OTHERS = {
    "products": "invariance.check_products",
    "free_products": "invariance.check_products",
    "invariance": "invariance.check_model",
    "profile": "profiling.profile_steps",
}
"""Their functions are imported late, since one of these modules may not import."""


def probe(scale: Scale, lines: Lines) -> None:
    """The device, what is installed, the memory that the model will take, one kernel's launch."""
    lines.fact("about", _about(scale))
    if scale.device.type == "cuda":
        properties = torch.cuda.get_device_properties(scale.device)
        free, total = torch.cuda.mem_get_info()
        lines.fact("capability", f"{properties.major}.{properties.minor}")
        lines.fact("multiprocessors", properties.multi_processor_count)
        lines.fact("memory free, total, GiB", f"{free / 2**30:.2f}, {total / 2**30:.2f}")
        check_fits(scale, free)
    else:
        # The arithmetic of the full run needs no device, and a smaller one must not come to it.
        check_fits(full_scale(), _H100_BYTES)
    for name, size in memory_plan(full_scale()).items():
        lines.fact(f"full run, {name}, GiB", size / 2**30)
    check_one(scale)
    lines.fact("a decode kernel against its twin", "agrees")


def ceilings(scale: Scale, lines: Lines) -> None:
    measured = measure_ceilings(
        scale.device, dtype=scale.dtype, is_small=scale.is_dry, budget_s=scale.budget_s
    )
    lines.fact("ceilings", asdict(measured))
    lines.fact("copy, GB/s", measured.copy_bytes_per_s / 1e9)
    lines.fact("read, GB/s", measured.read_bytes_per_s / 1e9)
    lines.fact("matrix product, TFLOP/s", measured.matmul_flops / 1e12)


def warm(scale: Scale, lines: Lines, *, share: int, num_shares: int) -> None:
    """Compiles what the later parts launch: Triton keeps it on the disk for their processes."""
    if scale.device.type == "cpu":
        return
    checks = check_kernels(scale, lines, share=share, num_shares=num_shares)
    for _ in itertools.islice(checks, 8):  # Two combinations in each process, the common ones.
        pass


def check(scale: Scale, lines: Lines, *, share: int, num_shares: int) -> None:
    """Every kernel against its twin, and a row's bits alone against its bits in a batch."""
    num_checks = 0
    for what, fault in check_kernels(scale, lines, share=share, num_shares=num_shares):
        num_checks += 1
        if fault:
            lines.fault(what, fault)
    lines.fact(f"checks, share {share + 1} of {num_shares}", num_checks)


def run_part(
    name: str, scale: Scale, folder: Path, *, only: str = "", share: int = 0, num_shares: int = 1
) -> None:
    """Runs one part; what it finds is appended to the lines in ``folder``."""
    lines = Lines(folder, name, only=only)
    if not (name.startswith("free_") or scale.is_dry):
        make_batch_invariant()  # As an engine does, and what the others are compared with.
    if name in TIMED:
        _function(TIMED[name])(Timer(scale, _known_ceilings(folder, scale), lines))
    elif name in OTHERS:
        _function(OTHERS[name])(scale, lines)
    elif name in ("warm", "check"):
        {"warm": warm, "check": check}[name](scale, lines, share=share, num_shares=num_shares)
    else:
        {"probe": probe, "ceilings": ceilings}[name](scale, lines)


def _function(name: str) -> Any:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"bench.gpu.{module}"), function)


def _known_ceilings(folder: Path, scale: Scale) -> Ceilings:
    """Those of this run; without them, as where one part is run by hand, measured now."""
    known: dict[str, Any] | None = fact(read_lines(folder), "ceilings")
    if known is not None:
        return Ceilings(**known)
    return measure_ceilings(
        scale.device, dtype=scale.dtype, is_small=scale.is_dry, budget_s=scale.budget_s
    )


def _about(scale: Scale) -> dict[str, str]:
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    is_gpu = scale.device.type == "cuda"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(scale.device) if is_gpu else "a CPU",
        "cpu": f"{cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command("bench.gpu.part", __doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="on a CPU, small")
    parser.add_argument("--only", default="", help="one case, as a `begin` line names it")
    parser.add_argument(
        "--share", default="0/1", help="number and count of processes that share it"
    )
    options = parser.parse_args(arguments)
    share, num_shares = (int(value) for value in options.share.split("/"))
    scale = dry_scale() if options.dry else full_scale()
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if str(options.out) == os.devnull else options.out
        run_part(options.name, scale, folder, only=options.only, share=share, num_shares=num_shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
