"""Messages between an executor and a rank over their connection.

executor → rank    `RankStart`; then `Allocate`; then a message per step
rank → executor    `Loaded`; then `Ready`; then, from rank 0, a message per step
                   `Failed`, at any time, and the rank ends

The messages of steps and their outputs are those of `quire.worker.step.codec.StepSlots`.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.worker.api.config import EngineConfig
from quire.worker.api.kv_format import KvFormat

Store = Path | tuple[str, int]
"""Where the ranks find each other: an empty file on their node, or an address at which rank 0
listens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """The first message to a rank: who it is, and where it finds the others."""

    rank: int
    config: EngineConfig
    num_on_node: int
    """Ranks that share its node."""
    store: Store
    slots_offset: int
    """Offset in shared memory at which the slots of steps begin, and the size of each."""
    slot_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The weights are there, and this many blocks of KV would fit."""

    num_blocks: int
    is_gpu: bool
    numerics: str
    kv_format: KvFormat
    num_host_blocks: int
    """Slots of host memory that are wanted; all ranks of one node want as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    """What all ranks have room for, and where in shared memory the slots of host memory begin."""

    num_blocks: int
    num_host_blocks: int
    host_offset: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The KV cache is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An exception ended the rank."""

    kind: str
    """"ConfigError", "CheckpointError" or another exception's name."""
    message: str
    traceback: str
