"""Checks and times every kernel on a CUDA device, and writes what it found to bench/results/.

    PYTHONPATH=kernels python -m bench.gpu.run [--quick]

Needs torch with CUDA and triton, and no other dependency of Quire (nor Quire installed, where
PYTHONPATH names its kernels). In order: each kernel
against its twin, and a row's bits alone against its bits in a batch; the device's measured limits
(copy, bfloat16 matrix product); each kernel's time beside PyTorch's SDPA on dense tensors, and
beside flashinfer and flash_attn where they are installed. A kernel that is wrong stops the run
with status 1 before anything is timed.
"""

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench.kernels import (
    GPU_CASES,
    GPU_SHAPE,
    Case,
    Ceilings,
    Shape,
    gpu_stream_cases,
    make_batch,
    measure_ceilings,
    sdpa_call,
    seconds,
    write_kv_seconds,
)
from bench.stream_kernels import StreamCase
from torch import Tensor

from quire.kernels import reference
from quire.kernels.backend import AttentionBackend, backend_for
from quire.kernels.launch import DTYPES, HEAD_SIZES
from quire.kernels.testing import PagedBatch, assert_near_twin, paged_batch

RESULTS = Path(__file__).resolve().parent.parent / "results"
RAGGED = [(1, 1), (256, 1), (257, 1), (1500, 1), (5, 5), (300, 70), (333, 333)]
NUM_DECODES = 4
SHAPES = {
    "32:8 heads of 128": GPU_SHAPE,
    "24:8 heads of 64": Shape(num_heads=24, num_kv_heads=8, head_size=64),
}


@dataclass(frozen=True, kw_only=True)
class Timing:
    shape: str
    case: str
    implementation: str
    ms: float
    rate: float
    """Bytes of KV (decode, write) or flops (prefill) a second."""
    share_of_limit: float


def check_kernels(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yields (what was checked, its fault or ""), for every kernel, dtype, head and block size."""
    backend = backend_for(device)
    for dtype, head_size, block_size in itertools.product(DTYPES, HEAD_SIZES, (4, 16, 128)):
        what = f"{str(dtype).removeprefix('torch.')} head {head_size} block {block_size}"
        batch = paged_batch(
            RAGGED,
            num_heads=6,
            num_kv_heads=2,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        yield f"twin, {what}", _fault(partial(_check_twin, batch, backend))
        yield f"bits, {what}", _fault(partial(_check_bits, batch, backend))
        yield f"write, {what}", _fault(partial(_check_write, batch, backend))
    for name, shape in SHAPES.items():
        for case in gpu_stream_cases(shape, device):
            yield f"twin, {case.name}, {name}", _fault(partial(_check_stream, case))


def _fault(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # whatever a kernel does wrong is a finding of this run
        return f"{type(error).__name__}: {error}"
    return ""


def _check_twin(batch: PagedBatch, backend: AttentionBackend) -> None:
    expected = batch.expected()
    assert_near_twin(batch.attend(backend, num_decodes=NUM_DECODES), expected)
    assert_near_twin(batch.attend(backend, num_decodes=0), expected)


def _check_bits(batch: PagedBatch, backend: AttentionBackend) -> None:
    """A row alone, and a prompt in chunks, against the whole batch at once."""
    together = batch.attend(backend, num_decodes=NUM_DECODES)
    for row, (_, queries) in enumerate(batch.rows):
        start = batch.query_starts[row]
        alone = batch.only(row).attend(backend, num_decodes=int(row < NUM_DECODES))
        assert torch.equal(alone, together[start : start + queries]), f"row {row} differs alone"
    last = len(batch.rows) - 1
    start = batch.query_starts[last]
    for first, end in ((0, 1), (1, 200), (200, 333)):
        chunk = batch.cut(last, first, end).attend(backend)
        same = torch.equal(chunk, together[start + first : start + end])
        assert same, f"queries {first} to {end} differ in a chunk of their own"


def _check_write(batch: PagedBatch, backend: AttentionBackend) -> None:
    k, v = batch.dense_kv[-1]
    slots = torch.randperm(batch.k_cache.shape[0] * batch.k_cache.shape[1])[: len(k)].to(k.device)
    got = batch.k_cache.clone(), batch.v_cache.clone()
    want = batch.k_cache.clone(), batch.v_cache.clone()
    backend.write_kv(k, v, *got, slots)
    reference.write_kv(k, v, *want, slots)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)), "the caches differ"


def _check_stream(case: StreamCase) -> None:
    for got, want in zip(case.kernel(), case.twin(), strict=True):
        assert_near_twin(got, want)


def time_kernels(
    device: torch.device, ceilings: Ceilings, *, cases: list[Case]
) -> Iterator[Timing]:
    backend = backend_for(device)
    for (name, shape), case in itertools.product(SHAPES.items(), cases):
        batch = make_batch(case, shape, device)
        work = case.kv_bytes(shape) if case.is_decode else case.flops(shape)
        limit = ceilings.copy_bytes_per_s if case.is_decode else ceilings.matmul_flops
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
                duration = seconds(call, device=device)
            except Exception as error:  # a peer that cannot do a case is not our failure
                if implementation == "quire":
                    raise
                print(f"{implementation}, {case.name}: {type(error).__name__}: {error}")
                continue
            rate = work / duration
            yield Timing(
                shape=name,
                case=case.name,
                implementation=implementation,
                ms=duration * 1e3,
                rate=rate,
                share_of_limit=rate / limit,
            )
    for (name, shape), num_tokens in itertools.product(SHAPES.items(), (1, 64, 2048, 16384)):
        duration, size = write_kv_seconds(
            shape, num_tokens=num_tokens, backend=backend, device=device
        )
        yield Timing(
            shape=name,
            case=f"write_kv {num_tokens}",
            implementation="quire",
            ms=duration * 1e3,
            rate=size / duration,
            share_of_limit=size / duration / ceilings.copy_bytes_per_s,
        )
    for name, shape in SHAPES.items():
        for stream in gpu_stream_cases(shape, device):
            for implementation, call in {"quire": stream.kernel, "twin": stream.twin}.items():
                duration = seconds(call, device=device)
                rate = stream.num_bytes / duration
                yield Timing(
                    shape=name,
                    case=stream.name,
                    implementation=implementation,
                    ms=duration * 1e3,
                    rate=rate,
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


def write_results(about: dict[str, str], ceilings: Ceilings, timings: list[Timing]) -> Path:
    """Writes ``<date>-gpu-kernels.json`` and ``.md``; returns the latter."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{about['date']}-gpu-kernels.md"
    path.with_suffix(".json").write_text(
        json.dumps(
            {"about": about, "ceilings": asdict(ceilings), "timings": [asdict(t) for t in timings]},
            indent=1,
        )
        + "\n"
    )
    lines = [
        f"# Kernels on {about['device']}, {about['date']}",
        "",
        "`python -m bench.gpu.run` at commit "
        f"{about['commit']}, torch {about['torch']}, triton {about['triton']}. bfloat16, blocks of "
        "16 tokens, the level-2 cache overwritten before each call, medians. Decode counts the "
        "bytes of KV it must read against a copy, prefill the flops of the tokens that are seen "
        "against a matrix product.",
        "",
        f"Measured limits: copy {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s, matrix product "
        f"{ceilings.matmul_flops / 1e12:.0f} TFLOP/s.",
        "",
        "| heads | case | implementation | ms | rate | of limit |",
        "|---|---|---|---:|---:|---:|",
    ]
    for t in timings:
        unit, scale = ("TFLOP/s", 1e12) if t.case.startswith("prefill") else ("GB/s", 1e9)
        lines.append(
            f"| {t.shape} | {t.case} | {t.implementation} | {t.ms:.4f} | {t.rate / scale:.1f} "
            f"{unit} | {t.share_of_limit:.1%} |"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def describe(device: torch.device) -> dict[str, str]:
    import triton

    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": git.stdout.strip() or "unknown",
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.run")
    parser.add_argument("--quick", action="store_true", help="time three cases only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "bench.gpu.run: torch finds no CUDA device; `python -m bench.kernels` times the CPU",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda")
    about = describe(device)
    print(about, flush=True)
    failures = 0
    for what, fault in check_kernels(device):
        failures += bool(fault)
        print(f"{'FAILED' if fault else 'ok':<7}{what} {fault}", flush=True)
    if failures:
        print(f"bench.gpu.run: {failures} checks failed, nothing was timed", file=sys.stderr)
        return 1
    ceilings = measure_ceilings(device, dtype=torch.bfloat16)
    print(ceilings, flush=True)
    timings = []
    for timing in time_kernels(
        device, ceilings, cases=GPU_CASES[2:8:2] if options.quick else GPU_CASES
    ):
        timings.append(timing)
        print(timing, flush=True)
    print(f"written to {write_results(about, ceilings, timings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
