"""Emulated global memory, which is that of tensors, and shared memory, initially NaN.

Every access is checked: inside one of the tensors that the kernel was given (not only inside
their storage), and aligned to its own size, as the GPU demands.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from tools.ptx.races import Races
from tools.ptx.values import UNSIGNED, Array


class MemoryFault(Exception):
    """An access out of bounds or not aligned. The message names address, size and neighbours."""


class GlobalMemory:
    """The tensors of a launch at the addresses that they have in this process."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        pieces = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name, tensor)
            for name, tensor in tensors
            if tensor.numel()
        )
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._names: list[str] = []
        self._storages: list[tuple[int, Array]] = []
        for begin, end, name, tensor in pieces:
            if self._ends and begin <= self._ends[-1] and self._storages[-1][0] == _storage(tensor):
                self._ends[-1] = max(end, self._ends[-1])
                self._names[-1] += f", {name}"
                continue
            self._begins.append(begin)
            self._ends.append(end)
            self._names.append(name)
            self._storages.append((_storage(tensor), _bytes(tensor)))

    def load(self, addresses: Array, active: Array | None, size: int, width: int) -> list[Array]:
        """``size`` bytes for each thread as ``size / width`` words of ``width`` bytes; 0 for the
        others."""
        words = [np.zeros(len(addresses), UNSIGNED[8 * width]) for _ in range(size // width)]
        for threads, storage, offsets in self._pieces(addresses, active, size):
            values = storage[: len(storage) // width * width].view(UNSIGNED[8 * width])
            first = offsets // width
            for number, word in enumerate(words):
                if threads is None:
                    words[number] = values[first + number]
                else:
                    word[threads] = values[first + number]
        return words

    def store(self, addresses: Array, active: Array | None, size: int, words: list[Array]) -> None:
        """Where several threads write to one place the last of them remains."""
        width = size // len(words)
        for threads, storage, offsets in self._pieces(addresses, active, size):
            values = storage[: len(storage) // width * width].view(UNSIGNED[8 * width])
            first = offsets // width
            for number, word in enumerate(words):
                values[first + number] = word if threads is None else word[threads]

    def _pieces(
        self, addresses: Array, active: Array | None, size: int
    ) -> Iterator[tuple[Array | None, Array, Array]]:
        """The threads (None where all), the memory and the offsets in it, by tensor."""
        threads = None if active is None else np.flatnonzero(active)
        wanted = addresses if threads is None else addresses[threads]
        if not len(wanted):
            return
        if size & (size - 1) == 0 and (wanted & np.uint64(size - 1)).any():
            wrong = int(wanted[(wanted % np.uint64(size)) != 0][0])
            raise MemoryFault(f"{size} bytes at {wrong:#x}, which is no multiple of {size}")
        lowest, highest = int(wanted.min()), int(wanted.max()) + size
        for number, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if begin <= lowest and highest <= end:
                base, storage = self._storages[number]
                yield threads, storage, (wanted - np.uint64(base)).astype(np.int64)
                return
        piece = np.searchsorted(np.array(self._begins, np.uint64), wanted, side="right") - 1
        ends = np.array(self._ends, np.uint64)
        outside = (piece < 0) | (wanted + np.uint64(size) > ends[piece])
        if outside.any():
            raise MemoryFault(self._outside(int(wanted[outside][0]), size))
        for number in np.unique(piece):
            base, storage = self._storages[number]
            here = np.flatnonzero(piece == number)
            offsets = (wanted[here] - np.uint64(base)).astype(np.int64)
            yield here if threads is None else threads[here], storage, offsets

    def _outside(self, address: int, size: int) -> str:
        def distance(number: int) -> int:
            return max(self._begins[number] - address, address + size - self._ends[number])

        if not self._begins:
            return f"{size} bytes at {address:#x}, and the kernel was given no tensor"
        nearest = min(range(len(self._begins)), key=distance)
        return (
            f"{size} bytes at {address:#x}, out of bounds; nearest is {self._names[nearest]}, from "
            f"{self._begins[nearest]:#x} to {self._ends[nearest]:#x}"
        )


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int((last + 1) * tensor.element_size())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> Array:
    storage = tensor.untyped_storage()
    whole = torch.tensor([], dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    bytes_: Array = whole.numpy()
    return bytes_


class SharedMemory:
    """A piece for each CTA. What was not written is NaN in every float type."""

    def __init__(self, num_ctas: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.stride = -(-max(num_bytes, 1) // 128) * 128
        self.bytes = np.full(num_ctas * self.stride, 0xFF, np.uint8)
        self.races = Races(len(self.bytes), num_ctas)

    def load(self, offsets: Array, size: int, width: int, warps: Array) -> list[Array]:
        """Words of ``width`` bytes at `check`ed offsets; ``warps`` of each CTA read them."""
        self.races.read(offsets, size, warps)
        values = self.bytes.view(UNSIGNED[8 * width])
        first = offsets // width
        return [values[first + number] for number in range(size // width)]

    def store(self, offsets: Array, size: int, words: list[Array], warps: Array) -> None:
        self.races.write(offsets, size, warps)
        self.put(offsets, size, words)

    def put(self, offsets: Array, size: int, words: list[Array]) -> None:
        """`store` without a look for races."""
        width = size // len(words)
        values = self.bytes.view(UNSIGNED[8 * width])
        first = offsets // width
        for number, word in enumerate(words):
            values[first + number] = word

    def check(self, addresses: Array, ctas: Array, size: int) -> Array:
        """Offsets into ``bytes`` of addresses within a CTA's piece.

        Raises:
            MemoryFault: One is out of bounds or not aligned.
        """
        offsets = addresses.astype(np.int64)
        if not len(offsets):
            return offsets
        if offsets.min() < 0 or offsets.max() + size > self.num_bytes:
            raise MemoryFault(
                f"{size} bytes at {int(offsets.min()):#x} to {int(offsets.max()):#x} of shared "
                f"memory, of which there are {self.num_bytes:#x}"
            )
        if (offsets & (size - 1)).any():
            wrong = int(offsets[(offsets & (size - 1)) != 0][0])
            raise MemoryFault(
                f"{size} bytes at {wrong:#x} of shared memory, which is no multiple of {size}"
            )
        return np.asarray(offsets + ctas * self.stride)

    def keep(self, ctas: Array) -> None:
        """Forgets all pieces but these."""
        self.bytes = self.bytes.reshape(-1, self.stride)[ctas].reshape(-1)
        self.races.keep(ctas)
