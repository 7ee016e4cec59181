"""Settings of admission, separate from the code for modules that only read them."""

from dataclasses import dataclass
from math import inf

from quire.worker.request.settings import Branch, part


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings(Branch):
    """What an operator may set of the queue of requests that wait at a gateway."""

    title = "admission"
    about = (
        "Requests wait as long as their clients do. Requests beyond these limits are refused at "
        "once, with a retry time."
    )

    max_queue_wait_s: float | None = None
    """A request is refused at once if its predicted wait exceeds this, or its own deadline, so that
    accepted requests keep their latency. If absent, requests wait for as long as their clients
    do."""
    max_queued_requests: int = 2048
    """Completions that may wait at a gateway."""
    max_queued_bytes: int = 256 * 2**20
    """Memory for the prompts of waiting completions: six bytes for each token. One request may take
    more if no other waits."""
    max_inflight: int = 4096
    """Completions in progress at a gateway, including waiting ones."""

    def _check(self) -> None:
        wait_s = self.max_queue_wait_s
        self._must(wait_s is None or wait_s >= 0, "max_queue_wait_s", "must be 0 or more")
        self._must_be_at_least(1, "max_queued_requests", "max_queued_bytes", "max_inflight")

    def admission(self) -> "AdmissionConfig":
        """The configuration of each gateway's queue."""
        wait_s = self.max_queue_wait_s
        return part(AdmissionConfig, self, max_queue_wait_s=inf if wait_s is None else wait_s)


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig(AdmissionSettings):
    """The configuration of the queue of requests that wait at a gateway.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    max_queue_wait_s: float = inf
    min_queued_per_group: int = 2
    """This number of requests for each group may always wait, however long their prompts are."""
    max_group_wait_s: float = 0.25
    """How long a request may wait at a group. This must exceed the time between the group's frames,
    or the group falls idle. It should be short, because a request of higher priority cannot
    overtake one that waits at a group."""

    def _check(self) -> None:
        self._must_be_finite("max_group_wait_s", above_zero=True)
        self._must_be_at_least(1, "min_queued_per_group")
