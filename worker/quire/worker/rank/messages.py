"""Messages between an executor and a rank over their connection.

executor → rank    `RankStart`; then `Allocate`; then a message per step
rank → executor    `Loaded`; then `Ready`; then, from rank 0, a message per step
                   `Failed` at any time, after which the rank ends

`quire.worker.rank.codec.StepSlots` defines the messages of steps and their outputs.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.worker.blocks.kv_format import KvFormat
from quire.worker.request.config import EngineConfig

Store = Path | tuple[str, int]
"""Where the ranks of a group meet: an empty file on their node, or the address of rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """The first message to a rank: its number, and where it meets the others."""

    rank: int
    config: EngineConfig
    num_on_node: int
    """Ranks on the same node, including this one."""
    store: Store
    slots_offset: int
    """Offset in shared memory of the slots of steps. ``slot_bytes`` is the size of each."""
    slot_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The rank has loaded its weights, and this many blocks of KV would fit."""

    num_blocks: int
    is_gpu: bool
    numerics: str
    kv_format: KvFormat
    num_host_blocks: int
    """Slots of host memory that the rank needs; equal for all ranks of one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocate:
    """The number of blocks that all ranks have room for, and the offset in shared memory of the
    slots of host memory."""

    num_blocks: int
    num_host_blocks: int
    host_offset: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has allocated its KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The rank ends because of an exception."""

    kind: str
    """"ConfigError", "CheckpointError" or another exception's name."""
    message: str
    traceback: str
