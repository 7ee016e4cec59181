"""Finds races between the warps of a CTA: accesses to shared memory without a barrier between them.

A byte of shared memory that one warp writes may be read by another only after a barrier, and one
that a warp has read may be written by another only after a barrier. The interpreter runs all
warps in step, so such a kernel gives the right result here; on a GPU it may not.

Several warps may write one place between two barriers, because the compiler lets several warps
store the same value. Atomics may race with each other, but not with other accesses.
"""

import numpy as np
from tools.ptx.values import Array

_MANY, _ATOMICS = 0xFFFF, 0xFFFE


class Race(Exception):
    """Two warps meet at a place without a barrier between them."""


class Races:
    """By byte of shared memory, which warp wrote and read it last, and after how many barriers."""

    def __init__(self, num_bytes: int, num_ctas: int) -> None:
        self.barriers = np.zeros(num_ctas, np.int32)
        """For each CTA, the number of barriers that its threads have passed."""
        self._stride = num_bytes // num_ctas
        self._writer: Array = np.zeros(num_bytes, np.uint16)
        self._reader: Array = np.zeros(num_bytes, np.uint16)
        self._written: Array = np.full(num_bytes, -1, np.int32)
        self._read: Array = np.full(num_bytes, -1, np.int32)

    def read(self, offsets: Array, size: int, warps: Array) -> None:
        """
        Raises:
            Race: Another warp wrote one of the bytes since the last barrier.
        """
        places, warps, now = self._places(offsets, size, warps)
        writer = self._writer[places]
        wrong = (self._written[places] == now) & (writer != warps) & (writer != _MANY)
        if wrong.any():
            raise Race(f"reads what {_name(writer[wrong][0])} wrote since the last barrier")
        _mark(self._reader, self._read, places, warps, now)

    def write(self, offsets: Array, size: int, warps: Array, *, is_atomic: bool = False) -> None:
        """
        Raises:
            Race: Another warp has read one of the bytes since the last barrier, or by an atomic
                changed it.
        """
        places, warps, now = self._places(offsets, size, warps)
        reader = self._reader[places]
        wrong = (self._read[places] == now) & (reader != warps)
        if wrong.any():
            raise Race(f"writes what {_name(reader[wrong][0])} has read since the last barrier")
        is_atomics = (self._written[places] == now) & (self._writer[places] == _ATOMICS)
        if not is_atomic and is_atomics.any():
            raise Race("writes what an atomic changed since the last barrier")
        if is_atomic:
            warps = np.full_like(warps, _ATOMICS)
        _mark(self._writer, self._written, places, warps, now)

    def keep(self, ctas: Array) -> None:
        """Forgets all CTAs but these."""
        self.barriers = self.barriers[ctas]

        def kept(state: Array) -> Array:
            return state.reshape(-1, self._stride)[ctas].reshape(-1)

        self._writer, self._reader = kept(self._writer), kept(self._reader)
        self._written, self._read = kept(self._written), kept(self._read)

    def _places(self, offsets: Array, size: int, warps: Array) -> tuple[Array, Array, Array]:
        """The bytes, and for each the warp and the number of barriers passed."""
        offsets, warps = np.broadcast_arrays(offsets, warps)
        places = (offsets.reshape(-1, 1) + np.arange(size)).reshape(-1)
        now = np.repeat(self.barriers[offsets.reshape(-1) // self._stride], size)
        return places, np.repeat(warps.reshape(-1).astype(np.uint16), size), now


def _mark(who: Array, when: Array, places: Array, warps: Array, now: Array) -> None:
    others = (when[places] == now) & (who[places] != warps)
    who[places] = warps
    others |= who[places] != warps  # several in this very instruction
    who[places[others]] = _MANY
    when[places] = now


def _name(warp: int) -> str:
    return {_MANY: "another warp", _ATOMICS: "an atomic"}.get(int(warp), f"warp {warp}")
