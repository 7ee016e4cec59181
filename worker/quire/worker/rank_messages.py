"""What an executor and a rank say to each other, beside `StepInput` and `StepOutput`.

executor → rank    `RankStart`; then the number of blocks; then a `StepInput` per step
rank → executor    `Loaded`; then `Ready`; then, from rank 0, a `StepOutput` per step
                   `Failed`, at any time, and the rank ends
"""

from dataclasses import dataclass
from pathlib import Path

from quire.worker.config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStart:
    rank: int
    config: EngineConfig
    rendezvous: Path
    """A file that does not exist yet, where the ranks find each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The weights are there, and this many blocks of KV would fit."""

    num_blocks: int


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
