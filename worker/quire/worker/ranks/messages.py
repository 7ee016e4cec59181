"""Messages between an executor and a rank over their socket.

executor → rank    `RankStart`; then the number of blocks; then a message per step
rank → executor    `Loaded`; then `Ready`; then, from rank 0, a message per step
                   `Failed`, at any time, and the rank ends

Steps and their outputs themselves lie in shared memory (`quire.worker.step.codec`): their messages
say that they are there, and are empty but for what seldom comes with them.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.worker.api.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    """The first message to a rank: who it is, and where it finds the others."""

    rank: int
    config: EngineConfig
    rendezvous: Path
    """A file that does not exist yet, where the ranks find each other."""
    slots_offset: int
    """Where in the shared memory the slots of steps begin, and the size of each."""
    slot_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The weights are there, and this many blocks of KV would fit."""

    num_blocks: int
    is_gpu: bool
    numerics: str


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
