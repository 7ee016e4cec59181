"""Triton all-reduce: GPUs read each other's tensors and add them in the order of the ranks.

**One shot**, for small tensors: every GPU reads the tensors of all the others at once.

Each rank has a buffer that the others have mapped. A program writes its piece of the tensor to its
own rank's buffer, signals the same program of each other rank, waits for their signals (a barrier),
and adds the pieces of all ranks in float32, rank 0's first. So every rank gets the same bits.

One barrier per call is enough, because a program alternates between the two halves of the buffer:
before it writes to a half again, it has passed a barrier with all readers of it. A program counts
its barriers in its own memory, so that a call can be part of a CUDA graph.

Traffic of a rank with ``n`` bytes among R ranks: ``n`` written and read of its own, and
``(R - 1) * n`` read over the links between GPUs. That is for small tensors, which wait for the
slowest link and not for its bytes.

**Two shots**, for large tensors: each rank adds one part of a block, in the same order and with the
same bits; after a second barrier all ranks read the parts of all. The links carry
``2 * (R - 1) / R * n`` bytes to each rank. A program loops over blocks, so the buffer does not grow
with the tensor. Data written before barrier i is in half ``i % 2`` and is read before barrier
i + 1, so the data of barrier i + 2 may overwrite it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import ALL_REDUCE_BLOCK, ALL_REDUCE_OPTIONS

MAX_BYTES = 256 << 10
"""Largest tensor for one shot: chosen, not measured."""
MAX_PROGRAMS = MAX_BYTES // 2 // ALL_REDUCE_BLOCK
MAX_RANKS = 8
TWO_SHOT_BYTES = 8 << 20
"""Half of a rank's buffer for tensors of more than `MAX_BYTES`, of any size."""
TWO_SHOT_PROGRAMS = 128
PIECE = tl.constexpr(8)
"""Values that are either all in the tensor or none, so that a thread may load them at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """One rank's view of its group. All ranks must pass tensors of the same shape and dtype."""

    rank: int
    size: int
    """A power of two up to `MAX_RANKS`."""
    buffers_R: Tensor
    """Addresses, int64, of each rank's buffer of ``2 * MAX_BYTES``; in two shots, of
    ``2 * TWO_SHOT_BYTES``."""
    flags_R: Tensor
    """Addresses of each rank's ``P * size`` int32, all 0 before the first call."""
    epochs_P: Tensor
    """int32 of `MAX_PROGRAMS` (two shots: `TWO_SHOT_PROGRAMS`): the number of barriers that each
    program has passed; 0 at first."""


def fits(x: Tensor) -> bool:
    """Whether `all_reduce` supports a tensor."""
    return x.nbytes <= MAX_BYTES and fits_two_shots(x)


def fits_two_shots(x: Tensor) -> bool:
    """Whether `all_reduce_in_two_shots` supports a tensor."""
    is_whole = x.is_contiguous() and x.numel() % PIECE.value == 0
    return is_whole and x.numel() < 1 << 30 and x.dtype.itemsize in (2, 4)


def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """Sums ``x`` over all ranks, in place, in one shot."""
    if x.numel() == 0:
        return x
    all_reduce_kernel[(triton.cdiv(x.numel(), ALL_REDUCE_BLOCK),)](
        x,
        peers.buffers_R,
        peers.flags_R,
        peers.epochs_P,
        peers.rank,
        x.numel() // PIECE.value,
        RANKS=peers.size,
        HALF=MAX_BYTES // x.dtype.itemsize,
        BLOCK=ALL_REDUCE_BLOCK,
        **ALL_REDUCE_OPTIONS,
    )
    return x


def all_reduce_in_two_shots(x: Tensor, peers: Peers) -> Tensor:
    """Sums a large ``x`` over all ranks, in place, with the bits of `all_reduce`."""
    if x.numel() == 0:
        return x
    num_blocks = triton.cdiv(x.numel(), ALL_REDUCE_BLOCK * peers.size)
    launch_two_shots((min(num_blocks, TWO_SHOT_PROGRAMS), 1), x, peers)
    return x


def launch_two_shots(grid: tuple[int, int], x: Tensor, peers: Peers) -> None:
    """Launches the kernel for ``grid[1]`` ranks from ``peers.rank`` on, whose tensors follow each
    other in ``x``: for 1 rank, or in a test for all ranks at once."""
    all_reduce_two_shot_kernel[grid](
        x,
        peers.buffers_R,
        peers.flags_R,
        peers.epochs_P,
        peers.rank,
        x.numel() // grid[1] // PIECE.value,
        RANKS=peers.size,
        HALF=TWO_SHOT_BYTES // x.dtype.itemsize,
        BLOCK=ALL_REDUCE_BLOCK,
        **ALL_REDUCE_OPTIONS,
    )


@triton.jit(do_not_specialize=["rank", "num_pieces"])
def all_reduce_kernel(
    x_ptr,
    buffers_ptr,
    flags_ptr,
    epochs_ptr,
    rank,
    num_pieces,
    RANKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    places = program * BLOCK + tl.arange(0, BLOCK)
    inside = places // PIECE < num_pieces
    epoch = tl.load(epochs_ptr + program) + 1
    half = (epoch & 1) * HALF
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    mine = _pointer(tl.load(buffers_ptr + rank), x_ptr.dtype)
    tl.store(mine + half + places, x, mask=inside)
    _meet(flags_ptr, program, rank, epoch, RANKS)

    total = tl.zeros([BLOCK], dtype=tl.float32)
    for other in tl.static_range(RANKS):
        piece = _pointer(tl.load(buffers_ptr + other), x_ptr.dtype)
        total += tl.load(piece + half + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + places, total.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(epochs_ptr + program, epoch)


@triton.jit(do_not_specialize=["rank", "num_pieces"])
def all_reduce_two_shot_kernel(
    x_ptr,
    buffers_ptr,
    flags_ptr,
    epochs_ptr,
    rank,
    num_pieces,
    RANKS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    rank += tl.program_id(1)
    x_ptr += tl.program_id(1).to(tl.int64) * num_pieces * PIECE
    epochs_ptr += tl.program_id(1) * tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program)
    mine = _pointer(tl.load(buffers_ptr + rank), x_ptr.dtype)
    places = tl.arange(0, BLOCK)
    base = program * (RANKS * BLOCK) + places
    for start in tl.range(
        program * (RANKS * BLOCK), num_pieces * PIECE, tl.num_programs(0) * (RANKS * BLOCK)
    ):
        epoch += 1
        half = (epoch & 1) * HALF
        for part in tl.static_range(RANKS):
            here = start + part * BLOCK + places
            inside = here // PIECE < num_pieces
            x = tl.load(x_ptr + here, mask=inside, other=0.0)
            tl.store(mine + half + base + part * BLOCK, x, mask=inside)
        _meet(flags_ptr, program, rank, epoch, RANKS)

        inside = (start + rank * BLOCK + places) // PIECE < num_pieces
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for other in tl.static_range(RANKS):
            theirs = _pointer(tl.load(buffers_ptr + other), x_ptr.dtype)
            theirs += half + rank * BLOCK
            total += tl.load(theirs + base, mask=inside, other=0.0).to(tl.float32)
        epoch += 1
        half = (epoch & 1) * HALF
        tl.store(mine + half + rank * BLOCK + base, total.to(x_ptr.dtype.element_ty), mask=inside)
        _meet(flags_ptr, program, rank, epoch, RANKS)

        for other in tl.static_range(RANKS):
            theirs = _pointer(tl.load(buffers_ptr + other), x_ptr.dtype)
            here = start + other * BLOCK + places
            inside = here // PIECE < num_pieces
            sums = tl.load(theirs + half + other * BLOCK + base, mask=inside, other=0.0)
            tl.store(x_ptr + here, sums, mask=inside)
    tl.store(epochs_ptr + program, epoch)


@triton.jit
def _meet(flags_ptr, program, rank, epoch, RANKS: tl.constexpr):
    """The barrier: signals the same program of every rank, and waits for all their signals."""
    tl.debug_barrier()  # all threads' writes precede the signal of one thread

    ranks = tl.arange(0, RANKS)
    theirs = tl.load(flags_ptr + ranks).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + program * RANKS + rank, epoch, sem="release", scope="sys")
    own = tl.load(flags_ptr + rank).to(tl.pointer_type(tl.int32)) + program * RANKS + ranks
    # Compared by difference, since the count may pass 2^31. Adding 0 is an acquire load.
    behind = tl.min(tl.atomic_add(own, 0, sem="acquire", scope="sys") - epoch, 0)
    while behind < 0:
        behind = tl.min(tl.atomic_add(own, 0, sem="acquire", scope="sys") - epoch, 0)
    tl.debug_barrier()


@triton.jit
def _pointer(address, dtype: tl.constexpr):
    return tl.multiple_of(address.to(dtype), 16)
