"""Limits on client connections at a gateway, and on the time for each part of a request.

They are separate from the code that enforces them, for modules that only read them.
"""

import logging
import resource
from dataclasses import dataclass
from math import inf

from quire.worker.request.errors import ConfigError

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Size of a request's first line and headers together."""
MAX_HEADERS = 128
GRPC_CONNECTION_AGE_S = 20.0
"""Age in seconds after which the server tells a gRPC client to open another connection and to begin
no call on the old one; running calls go on. Gateways that started later so get their share of
clients, and clients move away from a gateway that leaves."""
GRPC_LEAVE_S = 1.1 * GRPC_CONNECTION_AGE_S + 1
"""Time until all gRPC clients have left: gRPC varies the age by a tenth, plus one round trip."""
_FILES_PER_CONNECTION = 4
"""HTTP and gRPC may each use a quarter of the process's limit of open files. Half are left for
groups, logs, connections that are being refused, and Ray."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on the connections of one server.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    max_connections: int = 4096
    """Most open connections. Another one takes the place of the connection that has waited longest
    for a request; if all have a request, it is refused."""
    max_connections_per_address: int | None = None
    """Most connections from one address, separately over HTTP and gRPC; another one is closed.
    ``None``: no separate limit, since all clients may come through one load balancer."""
    shut_out_s: float = 60.0
    """How long an address that floods gRPC repeatedly gets no new connection, in seconds. 0: its
    flooding connections are ended, but it is not shut out."""
    head_timeout_s: float = 10.0
    """Seconds from the first byte of a connection or request to the end of the headers. A new
    connection's TLS handshake counts."""
    body_timeout_s: float = 60.0
    """Seconds from the end of the headers to the end of the request's body."""
    idle_timeout_s: float = 75.0
    """How long a connection is kept between requests, in seconds. It is longer than clients and
    load balancers keep theirs, commonly up to 60 s: the side that sends requests should close."""

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ConfigError(f"max_connections={self.max_connections!r}: must be 1 or more")
        if self.max_connections_per_address is not None and self.max_connections_per_address < 1:
            raise ConfigError(
                f"max_connections_per_address={self.max_connections_per_address!r}: must be 1 or "
                "more, or not set"
            )
        if not 0 <= self.shut_out_s < inf:
            raise ConfigError(f"shut_out_s={self.shut_out_s!r}: must be 0 or more, and finite")
        for name in ("head_timeout_s", "body_timeout_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0, and finite")


def allowed_connections(wanted: int) -> int:
    """``wanted``, or fewer if this process may not open as many files.

    Raises the process's own limit of open files as far as needed and permitted.
    """
    needed = wanted * _FILES_PER_CONNECTION
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = max(1, soft // _FILES_PER_CONNECTION)
    _log.warning(
        "max_connections=%d is lowered to %d: this process may open %d files (ulimit -n)",
        wanted,
        allowed,
        soft,
    )
    return allowed
