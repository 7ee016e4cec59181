"""Each shipped kernel against its plain-PyTorch twin, for `python -m tools.ptx` and the tests.

A case launches kernels inside the `emulated` that it is given and raises `AssertionError` where
they differ from their twins. Shapes are small and ragged: rows of one token, of a split and one
more, chunks behind cached context, and NaN wherever no token is.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol
from unittest import mock

import torch
from tools.kernels.captured import Launch
from tools.kernels.testing import PagedBatch, assert_near_twin, paged_batch, shared_splits
from tools.ptx.emulate import Edit, emulated
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.reference import paged as twins
from quire.kernels.triton import prefill as triton_prefill
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.decode import merge
from quire.kernels.triton.fp8 import converts_float8
from quire.kernels.triton.launch import SPLIT_TOKENS, capability_without_gpu

CAPABILITIES = (80, 90)
BACKEND = TritonBackend()
DECODES = ((1, 1), (SPLIT_TOKENS + 1, 1), (300, 1))
CHUNKS = ((70, 40), (33, 33), (5, 1))


class Emulate(Protocol):
    """`emulated` for one GPU."""

    def __call__(self, *, memory: tuple[Tensor, ...] = ()) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    kernels: tuple[str, ...]
    """Those that it must launch."""
    check: Callable[[Emulate], None]
    is_quick: bool = True
    """Whether the tests run it too: those of one kind differ by what the compiler makes of it."""

    def run(self, capability: int, *, edits: dict[str, Edit] | None = None) -> None:
        """
        Raises:
            AssertionError: A result differs from its twin's, or a kernel was not launched.
            Fault: A kernel did what a GPU would not forgive.
        """
        launches: list[Launch] = []
        self.check(partial(emulated, capability, edits=edits, launches=launches))
        missing = set(self.kernels) - {launch.name for launch in launches}
        assert not missing, f"{self.name} did not launch {sorted(missing)}"


def all_cases() -> Iterator[Case]:
    from tools.ptx.row_cases import row_cases

    yield from attention_cases()
    yield from row_cases()


def attention_cases() -> Iterator[Case]:
    half, half16 = torch.bfloat16, torch.float16
    for name, heads, size, dtype in (
        ("", (8, 2), 128, half),
        (" heads of 64 by 3", (6, 2), 64, half16),
        (" heads of 80", (3, 1), 80, half),
        (" heads of 256", (4, 1), 256, half),
        (" heads of 16", (2, 2), 16, half16),
        (" 20 heads in a group", (20, 1), 32, half),
        (" float32", (6, 2), 64, torch.float32),
    ):
        batch = partial(_batch, heads=heads, head_size=size, dtype=dtype)
        is_quick = name in ("", " heads of 80", " float32")
        yield _near(f"decode{name}", "decode_kernel", partial(batch, DECODES), is_quick=is_quick)
        yield _near(f"prefill{name}", "prefill_kernel", partial(batch, CHUNKS), is_quick=is_quick)
    batch = partial(_batch, heads=(6, 2), head_size=64, dtype=half, block_size=4)
    for name, options, is_quick in (
        ("window", AttentionOptions(window=33), True),
        ("soft cap", AttentionOptions(soft_cap=20.0), True),
        ("window and soft cap", AttentionOptions(window=300, soft_cap=2.0), False),
    ):
        for kind, rows in (("decode", ((40, 1), (330, 1))), ("prefill", CHUNKS)):
            yield _near(
                f"{kind} {name}",
                f"{kind}_kernel",
                partial(batch, rows),
                options=options,
                is_quick=is_quick,
            )
    for kind, rows in (("decode", ((40, 1), (330, 1))), ("prefill", CHUNKS)):
        yield Case(
            name=f"{kind} float8",
            kernels=("write_kernel", f"{kind}_kernel"),
            check=partial(check_float8, rows=rows),
        )
    yield Case(name="float8 by code", kernels=("decode_kernel",), check=check_codes)
    yield Case(
        name="decode shared",
        kernels=("decode_kernel", "shared_kernel", "merge_kernel"),
        check=check_shared,
    )
    yield Case(
        name="decode shared float8",
        kernels=("decode_kernel", "shared_kernel", "merge_kernel"),
        check=partial(check_shared, is_float8=True),
        is_quick=False,
    )
    yield Case(name="merge of many splits", kernels=("merge_kernel",), check=check_merge)
    yield Case(name="decode alone", kernels=("decode_kernel",), check=check_alone)
    for name, options, is_float8 in (
        ("", PLAIN, False),
        (" window and soft cap", AttentionOptions(window=70, soft_cap=5.0), False),
        (" float8", AttentionOptions(k_scale=0.5, v_scale=2.0), True),
    ):
        yield Case(
            name=f"prefill splits{name}",
            kernels=("prefill_kernel", "prefill_merge_kernel"),
            check=partial(check_splits, options=options, is_float8=is_float8),
            is_quick=not name,
        )
    yield Case(name="prefill in chunks", kernels=("prefill_kernel",), check=check_chunks)


def _near(
    name: str,
    kernel: str,
    make: Callable[[], PagedBatch],
    *,
    options: AttentionOptions = PLAIN,
    is_quick: bool = True,
) -> Case:
    kernels = (kernel, "merge_kernel") if kernel == "decode_kernel" else (kernel,)

    def check(emulate: Emulate) -> None:
        batch = make()
        with emulate():
            got = batch.attend(BACKEND, num_decodes=_num_decodes(batch), options=options)
        assert_near_twin(got, batch.expected(options=options))

    return Case(name=name, kernels=kernels, check=check, is_quick=is_quick)


def _batch(
    rows: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    block_size: int = 16,
) -> PagedBatch:
    return paged_batch(
        rows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )


def _num_decodes(batch: PagedBatch) -> int:
    return len(batch.rows) if all(queries == 1 for _, queries in batch.rows) else 0


def check_float8(emulate: Emulate, *, rows: tuple[tuple[int, int], ...]) -> None:
    """The cache is written by the kernel too, to the same bits as the twin's."""
    options = AttentionOptions(k_scale=0.02, v_scale=0.03)
    batch = _batch(rows, heads=(6, 2), head_size=128, dtype=torch.bfloat16)
    got = torch.zeros(2, *batch.k_cache.shape).to(torch.float8_e4m3fn)
    want = got.clone()
    for (tokens, _), (k, v), table in zip(
        batch.rows, batch.dense_kv, batch.block_tables, strict=True
    ):
        token = torch.arange(tokens)
        slots = table[token // 16].long() * 16 + token % 16
        with emulate():
            BACKEND.write_kv(k, v, got[0], got[1], slots, options=options)
        twins.write_kv(k, v, want[0], want[1], slots, options=options)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    batch = replace(batch, k_cache=got[0], v_cache=got[1])
    with emulate():
        attended = batch.attend(BACKEND, num_decodes=_num_decodes(batch), options=options)
    assert_near_twin(attended, batch.expected(options=options))


def check_codes(emulate: Emulate) -> None:
    """Attention over one token is its V: a head of 256 shows what each code is read as."""
    for dtype in (torch.bfloat16, torch.float16):
        batch = _batch(((1, 1),), heads=(1, 1), head_size=256, dtype=dtype)
        codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
        v_cache = codes.expand(batch.v_cache.shape).contiguous()
        k_cache = torch.zeros(batch.k_cache.shape).to(torch.float8_e4m3fn)
        with emulate():
            got = replace(batch, k_cache=k_cache, v_cache=v_cache).attend(BACKEND, num_decodes=1)
            has_nan = converts_float8(capability_without_gpu.get())
        want = codes.to(dtype) if has_nan else codes.float().nan_to_num(480).to(dtype)
        want[255] = want[255] if has_nan else -480
        torch.testing.assert_close(got[0, 0], want, atol=0, rtol=0, equal_nan=True)


def check_shared(emulate: Emulate, *, is_float8: bool = False) -> None:
    """Rows that read a prefix together have the bits that they have apart."""
    rows = ((2 * SPLIT_TOKENS + 9, 1), (7, 1), (SPLIT_TOKENS + 1, 1))
    batch = _batch(rows, heads=(8, 2), head_size=128, dtype=torch.bfloat16)
    batch = batch.with_shared_prefix(0, 2, SPLIT_TOKENS // 16)
    if is_float8:
        k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in _caches(batch))
        batch = replace(batch, k_cache=k_cache, v_cache=v_cache)
    shared = shared_splits(batch, num_decodes=3)
    assert shared is not None
    with emulate():
        together = batch.attend(BACKEND, num_decodes=3, shared=shared)
        apart = batch.attend(BACKEND, num_decodes=3)
    assert torch.equal(together, apart)
    assert_near_twin(apart, batch.expected())


def _caches(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    return batch.k_cache, batch.v_cache


def check_merge(emulate: Emulate) -> None:
    """Rows of up to 40 splits, against a merge in float64; no row depends on the others."""
    rng = torch.Generator().manual_seed(0)
    num_splits = torch.tensor([1, 40, 0, 16, 17, 33])
    seq_lens = (num_splits * SPLIT_TOKENS - 3).clamp(min=0).int()
    parts = torch.randn(len(seq_lens), 2, 40, 80, generator=rng)
    stats = torch.rand(len(seq_lens), 2, 40, 2, generator=rng) * 9 + 1
    present = torch.arange(40) < num_splits[:, None]
    parts[~present[:, None].expand(-1, 2, -1)] = float("nan")
    stats[~present[:, None].expand(-1, 2, -1)] = float("nan")
    out = torch.full((len(seq_lens), 2, 80), float("nan"))
    alone = out.clone()
    with emulate():
        merge(parts, stats, out, seq_lens_B=seq_lens, v_scale=0.5)
        for row in range(len(seq_lens)):
            one = slice(row, row + 1)
            merge(
                parts[one, :, : max(1, num_splits[row])].contiguous(),
                stats[one, :, : max(1, num_splits[row])].contiguous(),
                alone[one],
                seq_lens_B=seq_lens[one],
                v_scale=0.5,
            )
    maxima, sums = stats.double().unbind(-1)
    shares = torch.where(present[:, None], torch.exp2(maxima), 0).nan_to_num()
    values = (shares[..., None] * parts.double().nan_to_num()).sum(2) * 0.5
    want = values / (shares * sums.nan_to_num()).sum(2).clamp(min=1e-9)[..., None]
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-6)
    assert torch.equal(out, alone)


def check_alone(emulate: Emulate) -> None:
    """A decode has the same bits alone as in a batch."""
    batch = _batch(DECODES, heads=(8, 2), head_size=128, dtype=torch.bfloat16)
    with emulate():
        together = batch.attend(BACKEND, num_decodes=len(DECODES))
        for row in range(len(DECODES)):
            alone = batch.only(row).attend(BACKEND, num_decodes=1)
            assert torch.equal(alone, together[row : row + 1]), row


def check_splits(
    emulate: Emulate, *, options: AttentionOptions = PLAIN, is_float8: bool = False
) -> None:
    """One program for all splits and a program for each leave the same bits, in any chunk."""
    rows = ((170, 40), (5, 1))
    batch = _batch(rows, heads=(2, 1), head_size=64, dtype=torch.bfloat16)
    if is_float8:
        k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in _caches(batch))
        batch = replace(batch, k_cache=k_cache, v_cache=v_cache)
    in_splits = mock.patch.object(triton_prefill, "prefill_split", return_value=64)
    with in_splits, emulate():
        with mock.patch.object(triton_prefill, "prefill_parts", return_value=1):
            one = batch.attend(BACKEND, options=options)
        each = batch.attend(BACKEND, options=options)
        for first, end in ((0, 1), (19, 22), (39, 40)):
            part = batch.cut(0, first, end).attend(BACKEND, options=options)
            assert torch.equal(part, one[first:end]), (first, end)
    assert torch.equal(one, each)
    assert_near_twin(one, batch.expected(options=options))


def check_chunks(emulate: Emulate) -> None:
    """A token has the same bits in any chunk of its prompt."""
    batch = _batch(((133, 133),), heads=(4, 1), head_size=128, dtype=torch.bfloat16)
    with emulate():
        whole = batch.attend(BACKEND)
        for first, end in ((0, 1), (50, 100), (132, 133)):
            part = batch.cut(0, first, end).attend(BACKEND)
            assert torch.equal(part, whole[first:end]), (first, end)
    assert_near_twin(whole, batch.expected())
