"""The limits of a gateway's admission queue, in a module of their own because many modules need
nothing else of it."""

from dataclasses import dataclass
from math import inf

from quire.worker.request.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """The limits of requests that wait at a gateway.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    max_queue_wait_s: float = inf
    """A request is refused if its predicted wait exceeds this. If it is infinite, as by default,
    requests wait for as long as their clients do."""
    min_queued_per_group: int = 2
    """This number of requests for each group may always wait, however long their prompts are."""
    max_group_wait_s: float = 0.25
    """How long a request may wait at a group. This must exceed the time between the group's frames,
    or the group falls idle. It should be short, because a request of higher priority cannot
    overtake one that waits at a group."""
    max_queued_requests: int = 2048
    """Most completions that wait at the gateway; a request that would exceed it is refused."""
    max_queued_bytes: int = 256 * 2**20
    """Most memory that waiting requests take up (`Ticket.num_bytes`). One request may take more if
    no other waits."""
    max_inflight: int = 4096
    """Most completions in progress, including waiting ones; a request that would exceed it is
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
