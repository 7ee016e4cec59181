"""Runs one part of `bench.gpu.run` in a process of its own, so that a fault ends no other part.

    python -m bench.gpu.part NAME --out DIR [--dry] [--only CASE] [--share I/N]

`bench.gpu.run` starts it; by hand it repeats one part, or one case of it, for instance under
``compute-sanitizer``.
"""

import os
import platform
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from bench.gpu.checks import check_one
from bench.gpu.lines import Lines
from bench.gpu.run import PARTS
from bench.gpu.shapes import Scale, check_fits, dry_scale, full_scale, memory_plan
from bench.gpu.timings import Timer
from bench.provenance import commit, cpu
from bench.report import command

from quire.kernels.torch.products import make_batch_invariant

_H100_BYTES = int(79.65 * 2**30)


def probe(timer: Timer) -> None:
    """The device, what is installed, the memory that the model will take, one kernel's launch."""
    scale, lines = timer.scale, timer.lines
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


def ceilings(timer: Timer) -> None:
    measured = timer.measured_ceilings()
    timer.lines.fact("ceilings", asdict(measured))
    timer.lines.fact("copy, GB/s", measured.copy_bytes_per_s / 1e9)
    timer.lines.fact("read, GB/s", measured.read_bytes_per_s / 1e9)
    timer.lines.fact("matrix product, TFLOP/s", measured.matmul_flops / 1e12)


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
    parts = {part.name: part for part in PARTS}
    parser.add_argument("name", choices=parts)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true", help="on a CPU, small")
    parser.add_argument("--only", default="", help="one case, as a `begin` line names it")
    parser.add_argument(
        "--share", default="0/1", help="number and count of processes that share it"
    )
    options = parser.parse_args(arguments)
    share, num_shares = (int(value) for value in options.share.split("/"))
    scale = dry_scale() if options.dry else full_scale()
    if not (options.name.startswith("free_") or scale.is_dry):
        make_batch_invariant()  # As an engine does, and what the others are compared with.
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if str(options.out) == os.devnull else options.out
        lines = Lines(folder, options.name, only=options.only)
        parts[options.name].function()(Timer(scale, lines, share=share, num_shares=num_shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
