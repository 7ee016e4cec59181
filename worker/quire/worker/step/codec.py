"""Steps in memory that the engine and its ranks share: one copy, no pickles of arrays.

A step lies in a slot as a header, counts of things, and behind it its arrays one after the other,
each aligned. Rare parts (adjustments, copies, logprobs, hidden states) travel apart, in the message
that wakes the other side, so that a slot's size is bounded. Between nodes, without shared memory,
the same bytes are the message, followed by the rare parts.
"""

import math
import mmap
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.worker.api.config import EngineConfig
from quire.worker.step.messages import MAX_SCORED_TOKENS, StepInput, StepOutput
from quire.worker.step.sampling_batch import SAMPLE_TYPES, SamplingBatch

Bytes = npt.NDArray[np.uint8]

# T tokens   B sequences   Q = B + 1   M blocks   S samples   L late tokens

_ALIGNMENT = 64
_COUNTS = ("T", "B", "Q", "M", "S", "L", "decodes", "edits_follow")


_INT64, _INT32 = np.dtype(np.int64), np.dtype(np.int32)


class _Array(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: str
    """Dimensions, each a letter of ``_COUNTS``."""


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
)
_SAMPLING_ARRAYS = tuple(_Array(name, dtype, "S") for name, dtype in SAMPLE_TYPES.items())
_RARE = ("hidden_rows_H", "copies_X22")
_RARE_SAMPLING = ("adjustments", "given_S", "asked")
"""Fields of a `StepInput` and of its `SamplingBatch` that travel apart."""
_RARE_OUTPUTS = tuple(each.name for each in fields(StepOutput) if each.name != "token_ids_S")


class StepSlots:
    """One end of the memory. Slot ``n % 2`` belongs to the n-th step.

    It is written again once rank 0 has answered that step, which takes a collective of all ranks
    at its end: so none of them reads it any more.
    """

    def __init__(self, fd: int, *, offset: int, slot_bytes: int) -> None:
        """``fd`` is a file of ``offset + all_slots_bytes(slot_bytes)`` bytes."""
        memory = np.frombuffer(mmap.mmap(fd, offset + all_slots_bytes(slot_bytes)), np.uint8)
        self._slots = np.split(memory[offset:], 4)

    def step(self, number: int) -> Bytes:
        return self._slots[number % 2]

    def output(self, number: int) -> Bytes:
        return self._slots[2 + number % 2]


def all_slots_bytes(slot_bytes: int) -> int:
    """Memory that `StepSlots` need. What no step touches costs nothing."""
    return 4 * slot_bytes


def slot_bytes(config: EngineConfig, *, max_model_len: int) -> int:
    """Room for any step of an engine, or for its output."""
    seqs = config.max_num_seqs
    most = {
        "T": config.max_num_batched_tokens,
        "B": seqs,
        "Q": seqs + 1,
        "M": -(-max_model_len // config.block_size),
        "S": seqs + MAX_SCORED_TOKENS,
        "L": seqs,
    }
    arrays = (*_STEP_ARRAYS, *_SAMPLING_ARRAYS)
    return _ALIGNMENT + sum(_padded_bytes(array, most) for array in arrays)


def write_step(step: StepInput, slot: Bytes) -> object | None:
    """Returns what the message must carry; ``None`` for most steps."""
    return _write(step, slot)[0]


def read_step(slot: Bytes, message: Any) -> StepInput:
    """The step that `write_step` wrote. Its arrays are views of the slot."""
    return _read(slot, lambda _: message)


def step_to_bytes(step: StepInput, slot: Bytes) -> bytes:
    """The whole step as one message. ``slot`` is memory to work in, free again on return."""
    message, num_bytes = _write(step, slot)
    return slot[:num_bytes].tobytes() + pack(message)


def step_from_bytes(data: bytes) -> StepInput:
    """The step that `step_to_bytes` wrote."""
    # A copy, because tensors want arrays that may be written.
    slot = np.frombuffer(bytearray(data), np.uint8)
    return _read(slot, lambda num_bytes: unpack(data[num_bytes:]))


def write_output(output: StepOutput, slot: Bytes) -> object | None:
    """As `write_step`."""
    values = slot[: 8 * (len(output.token_ids_S) + 1)].view(np.int64)
    values[0] = len(output.token_ids_S)
    values[1:] = output.token_ids_S
    return _rare(output, _RARE_OUTPUTS) or None


def read_output(slot: Bytes, message: Any) -> StepOutput:
    """The output that `write_output` wrote, in memory of its own."""
    num_tokens = int(slot[:8].view(np.int64)[0])
    token_ids_S = slot[8 : 8 * (num_tokens + 1)].view(np.int64).copy()
    return StepOutput(token_ids_S, **(message or {}))


def output_message(output: StepOutput) -> object:
    """The whole output. Bytes take a fraction of the time that a pickled array does."""
    return output.token_ids_S.tobytes(), _rare(output, _RARE_OUTPUTS)


def output_of(message: Any) -> StepOutput:
    """The output whose `output_message` came."""
    token_ids, rare = message
    return StepOutput(np.frombuffer(token_ids, np.int64), **rare)


def pack(message: object | None) -> bytes:
    """The empty message is ``None``: pickling that would take longer than sending it."""
    return b"" if message is None else pickle.dumps(message, protocol=5)


def unpack(data: bytes) -> Any:
    """What `pack` was given. Unpickles, so only for what a process of one's own group has sent."""
    return pickle.loads(data) if data else None


def _write(step: StepInput, slot: Bytes) -> tuple[object | None, int]:
    """The parts that do not go into the slot, and the number of bytes filled in the slot."""
    sampling = step.sampling
    num_rows, num_blocks = step.block_tables_BM.shape
    counts = (
        *(len(step.token_ids_T), num_rows, num_rows + 1, num_blocks),
        *(len(step.samples_S), len(step.late_tokens_L), step.num_decodes, step.edits_follow),
    )
    slot[: 8 * len(counts)].view(np.int64)[:] = counts
    offset = _ALIGNMENT
    for source, arrays in ((step, _STEP_ARRAYS), (sampling, _SAMPLING_ARRAYS)):
        for name, dtype, _ in arrays:
            values = getattr(source, name)
            np.ndarray(values.shape, dtype, slot, offset)[...] = values
            offset += _aligned(values.nbytes)
    rare = _rare(step, _RARE), _rare(sampling, _RARE_SAMPLING)
    return rare if any(rare) else None, offset


def _rare(source: object, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of its fields that are not empty."""
    values = [(name, getattr(source, name)) for name in names]
    return {
        name: value
        for name, value in values
        if value is not None and (not isinstance(value, tuple) or value)
    }


def _read(slot: Bytes, message_behind: Callable[[int], Any]) -> StepInput:
    """``message_behind`` gets the number of bytes that the slot's arrays end at."""
    header = slot[: 8 * len(_COUNTS)].view(np.int64).tolist()
    counts = dict(zip(_COUNTS, header, strict=True))
    step, offset = _read_arrays(slot, _ALIGNMENT, _STEP_ARRAYS, counts)
    sampling, offset = _read_arrays(slot, offset, _SAMPLING_ARRAYS, counts)
    rare, rare_sampling = message_behind(offset) or ({}, {})
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
