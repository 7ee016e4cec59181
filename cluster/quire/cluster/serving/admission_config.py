"""The bounds of what waits at a gateway, apart from the queue, for those who only read them."""

from dataclasses import dataclass
from math import inf

from quire.worker.api.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """Bounds of what waits.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    max_queue_wait_s: float = 1.0
    """A request is refused if its predicted wait exceeds this. A larger value admits larger bursts;
    the first requests of a lasting overload then wait that long."""
    standing_wait_s: float = 1.0
    """Replaces ``max_queue_wait_s``, if it is less, once no request has found free groups for this
    time: a standing queue adds delay without adding throughput."""
    burst_wait_s: float = 5.0
    """Replaces both, if it is more, for a request for which a group has a slot and blocks, so
    that nothing needs to end before it: in a burst, which ends when no request has begun on
    arrival for 3 s."""
    min_queued_per_group: int = 2
    """This number of requests for each group may always wait, however long their prompts are."""
    max_group_wait_s: float = 0.25
    """How long a request may wait at a group. It must exceed the time between the group's frames,
    or the group falls idle; it should be short, because a request of higher priority can no longer
    overtake it."""
    max_queued_requests: int = 1024
    """Completions that wait at the gateway; a request that would exceed it is refused."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens of these. One request may have more, where nothing else waits."""

    def __post_init__(self) -> None:
        for name in ("max_queue_wait_s", "standing_wait_s", "burst_wait_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more seconds")
        if not 0 < self.max_group_wait_s < inf:
            raise ConfigError(
                f"max_group_wait_s={self.max_group_wait_s!r}: must be above 0 seconds and finite"
            )
        for name in ("min_queued_per_group", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 1 or more")
