"""How a simulated engine fills a step."""

from dataclasses import dataclass
from typing import Literal

from quire.worker.request.errors import ConfigError

Order = Literal["fcfs", "srpf"]


@dataclass(frozen=True, kw_only=True)
class SimulatedEngine:
    """Raises:
    ConfigError: A value cannot work; the message names it and what would be right.
    """

    chunk_tokens: int = 8192
    """Token budget of a step: prompt tokens, and one for each decode."""
    max_num_seqs: int = 1024
    order: Order = "fcfs"
    """Prompts in order of arrival, or the shortest remaining prefill first, shared out among those
    that wait for it, as in `quire.worker.engine.waiting`."""
    aging: float = 0.2
    """With srpf, the milliseconds of prefill that a millisecond of waiting offsets."""

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 1 or more")
