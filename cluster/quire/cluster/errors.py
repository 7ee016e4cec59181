"""Errors between a client and the replica groups.

QuireError (quire.worker.request.errors)
├── InvalidRequest, QueueFull    as in the engine
├── Unauthenticated              the request shows no API key, or an unknown one
├── NotAnOperator                the request needs an operator's API key, and has a tenant's
├── ModelNotFound                the request names a model that is not served here
├── GroupMismatch                a group serves another model or lays its blocks out differently
├── StartFailed                  the application did not start; what it had started is gone
├── ClusterLost                  Ray died while the application ran, or did not stop it in time
├── GroupLost                    a group's stream broke; its requests can go on elsewhere
│   ├── GroupDied                the group is gone, failed, silent or hangs
│   └── HandedOver               the group is healthy, and asks to continue on another group
├── Quarantined                  too many groups died under the request; it is not tried again
├── Overloaded(QueueFull)        the request would wait for too long; has a time to try again
│   └── RateLimited              the tenant of the request's API key has used up one of its limits
├── DeadlineExceeded             the request's deadline passed; earlier output reached the client
└── Unavailable                  no replica group can take the request now; try again later
"""

from dataclasses import dataclass
from typing import Literal

from quire.worker.request.errors import QueueFull, QuireError

RefusalReason = Literal[
    "wait",
    "deadline",
    "queue_full",
    "displaced",
    "timeout",
    "inflight",
    "bodies",
    "tenant_requests",
    "tenant_tokens",
    "tenant_concurrency",
]


@dataclass(slots=True, eq=False)
class Death:
    """One group's death, as a gateway sees it; shared by all completions that ran on the group."""

    group: str
    epoch: int
    is_refuted: bool = False
    """The same incarnation answered again: only the connection had died."""


class Unauthenticated(QuireError):
    """The request shows no API key, or one that is not known here."""


class NotAnOperator(QuireError):
    """The request needs an operator's API key, because it concerns all tenants."""


class ModelNotFound(QuireError):
    """The request names a model that is not served here."""


class GroupMismatch(QuireError):
    """A group's description contradicts this gateway's model card. The group gets no requests."""


class StartFailed(QuireError):
    """The application did not start. What it had started is gone."""


class ClusterLost(QuireError):
    """Ray died while the application ran, or did not stop it in time. What this process started
    is gone."""


class GroupLost(QuireError):
    """The stream to a group broke, or the group refused to continue. The tokens received so far
    stay valid, and another group can continue after them."""


class GroupDied(GroupLost):
    """The group is gone, failed, silent or hangs, as far as this gateway can tell."""

    def __init__(self, message: str, death: Death) -> None:
        super().__init__(message)
        self.death = death


class HandedOver(GroupLost):
    """The group drains, or cannot begin the request now. It is healthy, and the request is not
    blamed."""


class Quarantined(QuireError):
    """Too many groups died under the request, and at the last one it was isolated."""


class Overloaded(QueueFull):
    """The request is refused so that admitted requests keep their latency."""

    retry_after_s: float

    def __init__(self, message: str, *, reason: RefusalReason, retry_after_s: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The tenant of the request's API key has used up one of its limits."""


class DeadlineExceeded(QuireError):
    """The request's deadline has passed, and all its work was aborted."""


class Unavailable(QuireError):
    """No replica group can take the request now."""

    retry_after_s = 1.0
