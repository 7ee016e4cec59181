"""Encodes steps and outputs for transport: arrays in a slot, and a message.

A slot has a header with counts, and then the step's arrays one after the other, each aligned. Rare
parts (adjustments, copies, logprobs, hidden states) are sent in the message that wakes the
other side, so that a slot's size is bounded. On one node both sides share the slots: arrays are
copied once and not pickled. Between nodes the message also carries the slot's bytes.
"""

import math
import mmap
import pickle
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import MAX_SCORED_TOKENS, StepInput, StepOutput
from quire.worker.step.sampling_batch import SAMPLE_TYPES, SamplingBatch

Bytes = npt.NDArray[np.uint8]

# T tokens   B sequences   Q = B + 1   M blocks   S samples   L late tokens   A = B, or 0 where no
# row has an adapter

_ALIGNMENT = 64
_COUNTS = ("T", "B", "Q", "M", "S", "L", "A", "decodes", "edits_follow")


_HEADER_BYTES = -(-8 * len(_COUNTS) // _ALIGNMENT) * _ALIGNMENT
_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)


class _Array(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: str
    """The array's dimensions, each a letter of ``_COUNTS``."""


_STEP_ARRAYS = (
    _Array("token_ids_T", _INT64, "T"),
    _Array("positions_T", _INT64, "T"),
    _Array("slot_mapping_T", _INT64, "T"),
    _Array("block_tables_BM", _INT32, "BM"),
    _Array("seq_lens_B", _INT32, "B"),
    _Array("query_starts_B1", _INT32, "Q"),
    _Array("samples_S", _INT32, "S"),
    _Array("late_tokens_L", _INT32, "L"),
    _Array("late_rows_L", _INT32, "L"),
    _Array("adapter_slots_A", _INT32, "A"),
)
_SAMPLING_ARRAYS = tuple(_Array(name, dtype, "S") for name, dtype in SAMPLE_TYPES.items())
_RARE = ("hidden_rows_H", "copies_X22", "adapter_loads")
_RARE_SAMPLING = ("adjustments", "given_S", "asked")
"""Fields of a `StepInput` and of its `SamplingBatch` that are sent in the message."""
_RARE_OUTPUTS = tuple(each.name for each in fields(StepOutput) if each.name != "token_ids_S")


class StepSlots:
    """One end of the slots. Slot ``n % 2`` belongs to the n-th step.

    A slot is overwritten only after rank 0 has answered its step. The step ends with a collective
    of all ranks, so none of them reads the slot any more.
    """

    def __init__(self, slot_bytes: int, *, shared_fd: int | None = None, offset: int = 0) -> None:
        """``shared_fd`` is a file of ``offset + all_slots_bytes(slot_bytes)`` bytes that the other
        end maps too. Without one, messages carry the contents of slots."""
        self._is_shared = shared_fd is not None
        fd = -1 if shared_fd is None else shared_fd
        memory = np.frombuffer(mmap.mmap(fd, offset + all_slots_bytes(slot_bytes)), np.uint8)
        self._slots = np.split(memory[offset:], 4)

    def write_step(self, number: int, step: StepInput) -> object | None:
        """Writes a step to its slot. Returns what the message must carry; with shared slots, that
        is ``None`` for most steps."""
        slot = self._slots[number % 2]
        num_bytes = _write_arrays(step, slot)
        rare = _rare(step, _RARE), _rare(step.sampling, _RARE_SAMPLING)
        return self._message(slot[:num_bytes], rare if any(rare) else None)

    def read_step(self, number: int, message: Any) -> StepInput:
        """The step that `write_step` wrote. Its arrays are views of the slot."""
        slot, rare = self._contents(self._slots[number % 2], message)
        return _read(slot, rare)

    def write_output(self, number: int, output: StepOutput) -> object | None:
        """Writes an output to its slot, and returns what the message must carry."""
        slot = self._slots[2 + number % 2][: 8 * (len(output.token_ids_S) + 1)]
        values = slot.view(np.int64)
        values[0] = len(output.token_ids_S)
        values[1:] = output.token_ids_S
        return self._message(slot, _rare(output, _RARE_OUTPUTS) or None)

    def read_output(self, number: int, message: Any) -> StepOutput:
        """The output that `write_output` wrote, copied from the slot."""
        slot, rare = self._contents(self._slots[2 + number % 2], message)
        num_tokens = int(slot[:8].view(np.int64)[0])
        token_ids_S = slot[8 : 8 * (num_tokens + 1)].view(np.int64).copy()
        return StepOutput(token_ids_S, **(rare or {}))

    def _message(self, written: Bytes, rare: object | None) -> object | None:
        # Pickling bytes takes a fraction of the time of pickling the array.
        return rare if self._is_shared else (bytearray(written), rare)

    def _contents(self, slot: Bytes, message: Any) -> tuple[Bytes, Any]:
        if self._is_shared:
            return slot, message
        written, rare = message
        return np.frombuffer(written, np.uint8), rare


def all_slots_bytes(slot_bytes: int) -> int:
    """Bytes of memory that `StepSlots` need. Untouched pages cost nothing."""
    return 4 * slot_bytes


def slot_bytes(config: EngineConfig, *, max_model_len: int) -> int:
    """Bytes of a slot that has room for any step of an engine, and for any output."""
    seqs = config.max_num_seqs
    most = {
        "T": config.max_num_batched_tokens,
        "B": seqs,
        "Q": seqs + 1,
        "M": -(-max_model_len // config.block_size),
        "S": seqs + MAX_SCORED_TOKENS,
        "L": seqs,
        "A": seqs,
    }
    arrays = (*_STEP_ARRAYS, *_SAMPLING_ARRAYS)
    return _HEADER_BYTES + sum(_padded_bytes(array, most) for array in arrays)


def pack(message: object | None) -> bytes:
    """Pickles a message. ``None`` becomes the empty message: pickling would take longer than
    sending."""
    return b"" if message is None else pickle.dumps(message, protocol=5)


def unpack(data: bytes) -> Any:
    """The message that was passed to `pack`. Unpickles, so ``data`` must come from a process of
    the same group."""
    return pickle.loads(data) if data else None


def _write_arrays(step: StepInput, slot: Bytes) -> int:
    """Writes the arrays to the slot. Returns the number of bytes written."""
    num_rows, num_blocks = step.block_tables_BM.shape
    counts = (
        *(len(step.token_ids_T), num_rows, num_rows + 1, num_blocks),
        *(len(step.samples_S), len(step.late_tokens_L), len(step.adapter_slots_A)),
        *(step.num_decodes, step.edits_follow),
    )
    slot[: 8 * len(counts)].view(np.int64)[:] = counts
    offset = _HEADER_BYTES
    for source, arrays in ((step, _STEP_ARRAYS), (step.sampling, _SAMPLING_ARRAYS)):
        for name, dtype, _ in arrays:
            values = getattr(source, name)
            np.ndarray(values.shape, dtype, slot, offset)[...] = values
            offset += _aligned(values.nbytes)
    return offset


def _rare(source: object, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of ``source`` among ``names`` that are not empty."""
    values = [(name, getattr(source, name)) for name in names]
    return {
        name: value
        for name, value in values
        if value is not None and (not isinstance(value, tuple) or value)
    }


def _read(slot: Bytes, rare_parts: Any) -> StepInput:
    header = slot[: 8 * len(_COUNTS)].view(np.int64).tolist()
    counts = dict(zip(_COUNTS, header, strict=True))
    step, offset = _read_arrays(slot, _HEADER_BYTES, _STEP_ARRAYS, counts)
    sampling, _ = _read_arrays(slot, offset, _SAMPLING_ARRAYS, counts)
    rare, rare_sampling = rare_parts or ({}, {})
    return StepInput(
        **step,
        **rare,
        num_decodes=counts["decodes"],
        sampling=SamplingBatch(**sampling, **rare_sampling),
        edits_follow=bool(counts["edits_follow"]),
    )


def _read_arrays(
    slot: Bytes, offset: int, arrays: tuple[_Array, ...], counts: Mapping[str, int]
) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    for name, dtype, letters in arrays:
        shape = [counts[letter] for letter in letters]
        values: npt.NDArray[Any] = np.ndarray(shape, dtype, slot, offset)
        found[name] = values
        offset += _aligned(values.nbytes)
    return found, offset


def _padded_bytes(array: _Array, counts: Mapping[str, int]) -> int:
    num_items = math.prod(counts[letter] for letter in array.shape)
    return _aligned(num_items * array.dtype.itemsize)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
