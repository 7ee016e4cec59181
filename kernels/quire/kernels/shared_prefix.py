"""Finds the decodes of a step that read the same KV blocks, from their block tables on the host.

Sharing is found per split of decode attention (`launch.SPLIT_TOKENS` tokens, counted from token
0): rows whose tables have the same blocks up to the end of a split read it together. A group may
divide into smaller groups that share further splits, like the branches of a tree.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.kernels.triton.launch import SHARED_PAIRS, SPLIT_TOKENS

# B decodes   M blocks of the longest   X programs' worth of shared work   R rows in one of them

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

MIN_SAVED_BYTES = 1 << 30
"""KV bytes of one layer on one rank that sharing must save for a step to use it: a quarter of a
millisecond of an H200's memory bandwidth per layer. Chosen, not measured: concurrent rows find much
of their shared KV in the level-2 cache anyway, and a step that shares cannot use its CUDA graph,
which costs the host some 0.1 ms a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedArrays:
    """The shared work of a step; arrays are int32."""

    num_splits_B: Ints
    """The number of each row's splits, from token 0, that are read together with other rows."""
    rows_XR: Ints
    """The rows of each program, all of which share its split; padded with -1."""
    splits_X: Ints
    """The split of each program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSplits:
    """`SharedArrays` on the device."""

    num_splits_B: Tensor
    rows_XR: Tensor
    splits_X: Tensor


def rows_per_program(group: int) -> int:
    """How many rows, with ``group`` query heads per KV head each, fit one program."""
    return SHARED_PAIRS // group


def find_shared(
    block_tables_BM: Ints,
    seq_lens_B: Ints,
    *,
    block_size: int,
    group: int,
    min_saved_tokens: int,
) -> SharedArrays | None:
    """The shared work of decodes, or ``None`` if it saves less than ``min_saved_tokens``.

    ``group`` is the number of query heads per KV head. Above 8, two rows do not fit a program, and
    nothing is shared.
    """
    per_program = rows_per_program(group)
    if per_program < 2 or len(seq_lens_B) < 2:
        return None
    least = max(1, min_saved_tokens)
    for bound in (most_saved, most_saved_by_split):
        if bound(block_tables_BM, seq_lens_B, block_size=block_size) < least:
            return None
    num_splits_B = np.zeros(len(seq_lens_B), np.int32)
    rows: list[Ints] = []
    splits: list[Ints] = []
    saved = 0
    for members, begin, end in _groups(block_tables_BM, seq_lens_B, SPLIT_TOKENS // block_size):
        num_splits_B[members] = end
        saved += (len(members) - 1) * (end - begin) * SPLIT_TOKENS
        padded = np.full(-(-len(members) // per_program) * per_program, -1, np.int32)
        padded[: len(members)] = members
        programs = padded.reshape(-1, per_program)
        # Programs of one split are adjacent, so those after the first find its KV in the cache.
        rows.append(np.tile(programs, (end - begin, 1)))
        splits.append(np.repeat(np.arange(begin, end, dtype=np.int32), len(programs)))
    if saved == 0 or saved < min_saved_tokens:
        return None
    return SharedArrays(
        num_splits_B=num_splits_B, rows_XR=np.concatenate(rows), splits_X=np.concatenate(splits)
    )


def most_saved(tables_BM: Ints, seq_lens_B: Ints, *, block_size: int) -> int:
    """An upper bound on the tokens of KV that sharing can save. It takes microseconds, the exact
    search milliseconds. Rows that share anything share their first split, and the longest row of
    each such group reads its own KV in any case."""
    full_B = seq_lens_B // SPLIT_TOKENS
    long_B = np.flatnonzero(full_B)
    if len(long_B) < 2:
        return 0
    firsts = tables_BM[long_B, SPLIT_TOKENS // block_size - 1]
    order = np.argsort(firsts, kind="stable")
    firsts, full = firsts[order], full_B[long_B[order]]
    starts = np.flatnonzero(np.r_[True, firsts[1:] != firsts[:-1]])
    saved = np.add.reduceat(full, starts) - np.maximum.reduceat(full, starts)
    return int(saved.sum()) * SPLIT_TOKENS


def most_saved_by_split(tables_BM: Ints, seq_lens_B: Ints, *, block_size: int) -> int:
    """A tighter upper bound, in tens of microseconds: rows that share a split have the same last
    block in it, and all but one of them need not read it."""
    full_B = seq_lens_B // SPLIT_TOKENS
    num_splits = int(full_B.max(initial=0))
    per_split = SPLIT_TOKENS // block_size
    ends_BS = tables_BM[:, per_split - 1 : num_splits * per_split : per_split]
    # A split that a row does not have in full is never shared.
    own_B1 = -1 - np.arange(len(full_B), dtype=ends_BS.dtype)[:, None]
    has_BS = np.arange(ends_BS.shape[1]) < full_B[:, None]
    ordered_BS = np.sort(np.where(has_BS, ends_BS, own_B1), axis=0)
    return int((ordered_BS[1:] == ordered_BS[:-1]).sum()) * SPLIT_TOKENS


def _groups(tables_BM: Ints, seq_lens_B: Ints, per_split: int) -> Iterator[tuple[Rows, int, int]]:
    """Groups of rows, and the range ``(first, end)`` of splits that all rows of a group share."""
    full_B = seq_lens_B // SPLIT_TOKENS
    todo = [(np.arange(len(seq_lens_B)), 0)]
    while todo:
        rows, begin = todo.pop()
        rows = rows[full_B[rows] > begin]
        if len(rows) < 2:
            continue
        last = tables_BM[rows, (begin + 1) * per_split - 1]
        _, inverse, counts = np.unique(last, return_inverse=True, return_counts=True)
        for value in np.flatnonzero(counts > 1):
            members = rows[inverse == value]
            first = int(begin * per_split)
            limit = int(full_B[members].min()) * per_split
            tables = tables_BM[members, first:limit]
            same = (tables == tables[0]).all(axis=0)
            num_same = int(same.argmin()) if not same.all() else len(same)
            end = begin + num_same // per_split
            if end > begin:
                yield members, begin, end
                todo.append((members, end))
