"""The bounds of what waits at a gateway, apart from the queue, for those who only read them."""

from dataclasses import dataclass
from math import inf

from quire.worker.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Bounds of what waits.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    max_queue_wait_s: float = 1.0
    """A request that is predicted to wait for longer until a group begins it is refused. More takes
    larger bursts; the first of an overload that lasts then wait for as long."""
    standing_wait_s: float = 1.0
    """The same, where it is less, once no request has found free groups for as long as this: a
    queue that stands makes requests wait and nothing faster."""
    min_queued_per_group: int = 2
    """So many requests for each group may wait in any case, be they as long as they may."""
    max_group_wait_s: float = 0.25
    """How long what is sent to a group may wait there: longer than the time between its frames,
    or it falls idle; and not much, since nothing of higher priority can overtake it any more."""
    max_queued_requests: int = 1024
    """Completions that wait at the gateway; a request that would exceed it is refused."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens of these. One request may have more, where nothing else waits."""

    def __post_init__(self) -> None:
        for name in ("max_queue_wait_s", "standing_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more seconds")
        if not 0 < self.max_group_wait_s < inf:
            raise ConfigError(
                f"max_group_wait_s={self.max_group_wait_s!r}: must be above 0 seconds and finite"
            )
        for name in ("min_queued_per_group", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 1 or more")
