"""Checks and times every kernel and a whole model on a CUDA device; writes to bench/results/.

    PYTHONPATH=kernels:worker python -m bench.gpu.run [--quick] [--parts NAME,...] [--check]

Needs torch with CUDA, triton, and what the engine needs (for the model; not Ray). In this order:
each kernel against its twin, and a row's bits alone against its bits in a batch; the device's
limits (copy, bfloat16 matrix product); each kernel's time, beside PyTorch's SDPA on dense tensors
and beside flashinfer and flash_attn where they are installed; a Llama with the shape of the 8B
one and random weights, at batch 1, 32 and 256, beside the bytes that it must read.

A part that fails leaves the others alone; the file is written after each. The exit status is 1
where a part failed or a kernel was wrong, and what failed is at the head of the file. ``--check``
runs on a CPU what can run there, small, and writes to a temporary folder: a test of this script.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from bench.gpu.checks import check_kernels
from bench.gpu.shapes import Scale, dry_scale, full_scale
from bench.gpu.timings import (
    Timing,
    all_reduce_timings,
    attention_timings,
    shared_timings,
    stream_timings,
)
from bench.kernels import Ceilings, measure_ceilings
from bench.provenance import commit

RESULTS = Path(__file__).resolve().parent.parent / "results"


@dataclass(kw_only=True)
class Report:
    """What a run has found so far."""

    about: dict[str, str]
    ceilings: Ceilings | None = None
    timings: list[Timing] = field(default_factory=list)
    num_checks: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    """Of kernels and of parts of this run."""
    seconds: dict[str, float] = field(default_factory=dict)
    """That each part took."""


def model_timings(scale: Scale, ceilings: Ceilings) -> Iterator[Timing]:
    # Here and not above: the kernels must be timed where the engine's needs are not met.
    from bench.gpu import model

    return model.model_timings(scale, ceilings)


TIMED_PARTS: dict[str, Callable[[Scale, Ceilings], Iterator[Timing]]] = {
    "attention": attention_timings,
    "streams": stream_timings,
    "shared": shared_timings,
    "all_reduce": all_reduce_timings,
    "model": model_timings,
}


def run(scale: Scale, parts: list[str], folder: Path) -> Report:
    report = Report(about=describe(scale.device))
    print(report.about, flush=True)

    def check() -> None:
        for what, fault in check_kernels(scale):
            report.num_checks += 1
            if fault:
                report.faults[what] = fault
                print(f"FAILED {what} {fault}", flush=True)

    def measure() -> None:
        dtype = torch.float32 if scale.is_dry else torch.bfloat16
        report.ceilings = measure_ceilings(
            scale.device, dtype=dtype, is_small=scale.is_dry, budget_s=scale.budget_s
        )
        print(report.ceilings, flush=True)

    def time_part(part: Callable[[Scale, Ceilings], Iterator[Timing]]) -> None:
        assert report.ceilings is not None, "the part `ceilings` failed"
        for timing in part(scale, report.ceilings):
            report.timings.append(timing)
            print(timing, flush=True)

    todo: dict[str, Callable[[], None]] = {"checks": check, "ceilings": measure}
    todo |= {name: partial(time_part, part) for name, part in TIMED_PARTS.items()}
    for name in todo:
        if name != "ceilings" and parts and name not in parts:
            continue
        start = time.perf_counter()
        try:
            todo[name]()
        except Exception as error:  # of this part alone
            report.faults[f"part {name}"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        report.seconds[name] = round(time.perf_counter() - start, 1)
        write_results(report, folder)
    return report


def write_results(report: Report, folder: Path) -> Path:
    """Writes ``<date>-gpu.json`` and ``.md``; returns the latter."""
    folder.mkdir(exist_ok=True)
    about, ceilings = report.about, report.ceilings
    path = folder / f"{about['date']}-gpu.md"
    path.with_suffix(".json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    lines = [
        f"# Quire on {about['device']}, {about['date']}",
        "",
        f"`python -m bench.gpu.run` at commit {about['commit']}, torch {about['torch']}, triton "
        f"{about['triton']}. bfloat16, blocks of 16 tokens, medians; of kernels with the level-2 "
        "cache overwritten before each call. Decode counts the bytes of KV that it must read "
        "against a copy, prefill the flops of the tokens that are seen against a matrix product, "
        "a model's step the bytes of its weights and KV: the share is floor / time.",
        "",
        f"{report.num_checks} checks; faults: {len(report.faults)}.",
        "",
        *(f"- {what}: {fault.splitlines()[0]}" for what, fault in report.faults.items()),
    ]
    if ceilings is not None:
        lines += [
            "",
            f"Measured limits: copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, matrix product "
            f"{ceilings.matmul_flops / 1e12:.1f} TFLOP/s.",
        ]
    lines += [
        "",
        "| shape | case | implementation | ms | rate | of limit |",
        "|---|---|---|---:|---:|---:|",
    ]
    for t in report.timings:
        share = "" if t.share_of_limit is None else f"{t.share_of_limit:.1%}"
        lines.append(
            f"| {t.shape} | {t.case} | {t.implementation} | {t.ms:.4f} | {t.rate} | {share} |"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def describe(device: torch.device) -> dict[str, str]:
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit(),
    }


def main(arguments: list[str] | None = None) -> int:
    names = ["checks", *TIMED_PARTS]
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.run")
    parser.add_argument("--quick", action="store_true", help="time three cases of attention only")
    parser.add_argument("--parts", default="", help=f"of {','.join(names)}; all by default")
    parser.add_argument("--check", action="store_true", help="a dry run on a CPU")
    options = parser.parse_args(arguments)
    parts = [part for part in options.parts.split(",") if part]
    if unknown := set(parts) - set(names):
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if not options.check and not torch.cuda.is_available():
        print(
            "bench.gpu.run: torch finds no CUDA device; `--check` runs it on a CPU, and "
            "`python -m bench.kernels` times one",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        scale = dry_scale() if options.check else full_scale(is_quick=options.quick)
        report = run(scale, parts, Path(folder) if options.check else RESULTS)
    for what, fault in report.faults.items():
        print(f"FAILED {what}: {fault}", file=sys.stderr)
    print(f"{report.num_checks} checks, {len(report.timings)} timings, {report.seconds} s")
    return int(bool(report.faults))


if __name__ == "__main__":
    sys.exit(main())
