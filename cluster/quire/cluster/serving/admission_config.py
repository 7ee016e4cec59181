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

    max_queue_wait_s: float = inf
    """A request is refused if its predicted wait exceeds this. Infinite, as by default, it waits
    for as long as its client does."""
    min_queued_per_group: int = 2
    """This number of requests for each group may always wait, however long their prompts are."""
    max_group_wait_s: float = 0.25
    """How long a request may wait at a group. It must exceed the time between the group's frames,
    or the group falls idle; it should be short, because a request of higher priority can no longer
    overtake it."""
    max_queued_requests: int = 2048
    """Completions that wait at the gateway; a request that would exceed it is refused."""
    max_queued_bytes: int = 256 * 2**20
    """Memory that these take up (`Ticket.num_bytes`). One request may take more, where nothing else
    waits."""
    max_inflight: int = 4096
    """Completions under way, those that wait among them; a request that would exceed it is
    refused."""

    def __post_init__(self) -> None:
        if not self.max_queue_wait_s >= 0:
            raise ConfigError(f"max_queue_wait_s={self.max_queue_wait_s!r}: must be 0 or more")
        if not 0 < self.max_group_wait_s < inf:
            raise ConfigError(
                f"max_group_wait_s={self.max_group_wait_s!r}: must be above 0 seconds and finite"
            )
        for name in (
            "min_queued_per_group",
            "max_queued_requests",
            "max_queued_bytes",
            "max_inflight",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 1 or more")
