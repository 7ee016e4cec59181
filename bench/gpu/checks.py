"""Checks every kernel against its twin, and a row's bits alone against its bits in a batch."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from bench.gpu.shapes import SHAPES, Scale
from bench.gpu.streams import StreamCase, stream_cases
from bench.gpu.timings import Timer
from tools.kernels.testing import PagedBatch, assert_near_twin, paged_batch, shared_splits

from quire.kernels.backend import AttentionBackend, backend_for
from quire.kernels.reference import paged as twins
from quire.kernels.triton.launch import DTYPES, HEAD_SIZES

RAGGED = [(1, 1), (256, 1), (257, 1), (1500, 1), (5, 5), (300, 70), (333, 333)]
NUM_DECODES = 4


def warm(timer: Timer) -> None:
    """Compiles what the later parts launch: Triton keeps it on the disk for their processes."""
    if timer.scale.device.type == "cuda":
        # Two combinations in each process, the common ones.
        for _ in itertools.islice(check_kernels(timer), 8):
            pass


def check(timer: Timer) -> None:
    """Every kernel against its twin, and a row's bits alone against its bits in a batch."""
    num_checks = 0
    for what, fault in check_kernels(timer):
        num_checks += 1
        if fault:
            timer.lines.fault(what, fault)
    timer.lines.fact(f"checks, share {timer.share + 1} of {timer.num_shares}", num_checks)


def check_kernels(timer: Timer) -> Iterator[tuple[str, str]]:
    """Yields (what was checked, its fault or ""), for every kernel, dtype, head and block size.

    The common combinations come first. Compiling takes most of the time, so several processes
    each take one of ``num_shares`` equal shares.
    """
    scale, lines, share = timer.scale, timer.lines, timer.share
    device = scale.device
    backend = backend_for(device)
    combinations = sorted(
        itertools.product(DTYPES, HEAD_SIZES, (4, 16, 128)),
        key=lambda each: (each[0] != torch.bfloat16, each[1] not in (64, 128), each[2] != 16),
    )
    if scale.is_dry:
        combinations = [(torch.float32, 16, 16)]
    for dtype, head_size, block_size in combinations[share :: timer.num_shares]:
        what = f"{str(dtype).removeprefix('torch.')} head {head_size} block {block_size}"
        if not lines.begin(what):
            continue
        plain = paged_batch(
            RAGGED,
            num_heads=6,
            num_kv_heads=2,
            head_size=head_size,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        batch = plain.stored_by(backend) if device.type == "cpu" else plain
        yield f"twin, {what}", _fault(partial(_check_twin, plain, batch, backend))
        yield f"bits, {what}", _fault(partial(_check_bits, batch, backend))
        if device.type == "cuda":
            yield f"write, {what}", _fault(partial(_check_write, batch, backend))
            yield f"shared, {what}", _fault(partial(_check_shared, batch, backend))
    if device.type == "cuda" and share == 0:
        for name, shape in list(SHAPES.items())[:2]:
            for case in stream_cases(shape, device):
                if not lines.begin(f"{case.name}, {name}"):
                    continue
                yield f"twin, {case.name}, {name}", _fault(partial(_check_stream, case))


def check_one(scale: Scale) -> None:
    """A small decode against its twin. Raises AssertionError."""
    backend = backend_for(scale.device)
    batch = paged_batch(
        [(300, 1), (5, 1)],
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        dtype=scale.dtype,
        device=scale.device,
    )
    stored = batch.stored_by(backend) if scale.device.type == "cpu" else batch
    assert_near_twin(stored.attend(backend, num_decodes=2), batch.expected())


def _fault(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # whatever a kernel does wrong is a finding of this run
        return f"{type(error).__name__}: {error}"
    return ""


def _check_twin(plain: PagedBatch, batch: PagedBatch, backend: AttentionBackend) -> None:
    # The twin reads a cache as the reference lays it out.
    expected = plain.expected()
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
    twins.write_kv(k, v, *want, slots)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)), "the caches differ"


def _check_shared(batch: PagedBatch, backend: AttentionBackend) -> None:
    """Three decodes of which two read a split together, against the same three apart."""
    block_size = batch.k_cache.shape[1]
    batch = paged_batch(
        [(700, 1), (600, 1), (9, 1)],
        num_heads=6,
        num_kv_heads=2,
        head_size=batch.q.shape[2],
        block_size=block_size,
        dtype=batch.q.dtype,
        device=batch.q.device,
    ).with_shared_prefix(0, 1, 512 // block_size)
    shared = shared_splits(batch, num_decodes=3)
    assert shared is not None, "nothing is shared"
    together = batch.attend(backend, num_decodes=3, shared=shared)
    assert torch.equal(together, batch.attend(backend, num_decodes=3)), "sharing changes bits"


def _check_stream(case: StreamCase) -> None:
    for got, want in zip(case.kernel(), case.twin(), strict=True):
        assert_near_twin(got, want)
