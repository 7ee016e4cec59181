"""Which decodes of a step read the same blocks, found from their block tables on the host.

Sharing is found split by split, as decode attention takes them (`launch.SPLIT_TOKENS` tokens,
counted from token 0): rows whose tables name the same blocks up to the end of a split read it
together. Groups may part and go on sharing, as the branches of a tree do.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.kernels.launch import SHARED_PAIRS, SPLIT_TOKENS

# B decodes   M blocks of the longest   X programs' worth of shared work   R rows in one of them

Ints = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]

MIN_SAVED_TOKENS = 1 << 18
"""Tokens of KV that need not be read again, for a step to take this way: 1 GiB a layer at 8 heads
of 128 in 16 bits, a quarter of a millisecond of an H200's memory. Chosen, not measured: rows that
run side by side find much of what they share in the level-2 cache anyway, and a step that shares
forgoes its CUDA graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedArrays:
    """The shared work of a step; int32."""

    num_splits_B: Ints
    """Of each row, from token 0: splits that are read for it together with others."""
    rows_XR: Ints
    """The rows of a program, all of which share its split; -1 where there are fewer."""
    splits_X: Ints
    """The split of a program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSplits:
    """`SharedArrays` on the device."""

    num_splits_B: Tensor
    rows_XR: Tensor
    splits_X: Tensor


def rows_per_program(group: int) -> int:
    """Rows whose ``group`` query heads of one KV head fit one program together."""
    return SHARED_PAIRS // group


def find_shared(
    block_tables_BM: Ints,
    seq_lens_B: Ints,
    *,
    block_size: int,
    group: int,
    min_saved_tokens: int = MIN_SAVED_TOKENS,
) -> SharedArrays | None:
    """The shared work of decodes, or ``None`` where it saves less than ``min_saved_tokens``.

    ``group`` is the number of query heads of a KV head. Above 8 a program has no room for two
    rows, and nothing is shared.
    """
    per_program = rows_per_program(group)
    if per_program < 2 or len(seq_lens_B) < 2:
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
        # Programs of one split side by side: those after the first find its KV in the cache.
        rows.append(np.tile(programs, (end - begin, 1)))
        splits.append(np.repeat(np.arange(begin, end, dtype=np.int32), len(programs)))
    if saved == 0 or saved < min_saved_tokens:
        return None
    return SharedArrays(
        num_splits_B=num_splits_B, rows_XR=np.concatenate(rows), splits_X=np.concatenate(splits)
    )


def _groups(tables_BM: Ints, seq_lens_B: Ints, per_split: int) -> Iterator[tuple[Rows, int, int]]:
    """Rows and the splits, from the first to before the second, that all of them share."""
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
