"""Limits on client connections at a gateway, and on the time for each part of a request.

They are separate from the code that enforces them, for modules that only read them.
"""

import logging
import resource
from dataclasses import dataclass

from quire.worker.request.settings import Branch

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
class ConnectionLimits(Branch):
    """Limits on the connections of one server.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    title = "network"

    max_connections: int = 4096
    """Client connections that a gateway keeps open, over HTTP and over gRPC each; fewer if a
    process may not have four times as many files open. HTTP connections without a request, and gRPC
    connections without an admitted call, are closed to make room for new ones."""
    max_connections_per_address: int | None = None
    """Connections from one address. There is no limit by default: behind a load balancer, all
    clients may have its address."""
    shut_out_s: float = 60.0
    """How long an address that floods the gRPC port repeatedly is blocked; 0 only closes the
    connections that flood."""
    head_timeout_s: float = 10.0
    """Limit from the start of a connection to the end of its first request's headers, and from the
    first byte of each further request to the end of its headers; over gRPC, to the end of the
    handshake."""
    body_timeout_s: float = 60.0
    """Limit from the end of the headers to that of the body; over gRPC, of the call's message."""
    idle_timeout_s: float = 75.0
    """How long a connection without requests is kept. The default is longer than clients and load
    balancers keep theirs, commonly up to 60 s: the side that sends requests should close."""

    def _check(self) -> None:
        self._must_be_at_least(1, "max_connections")
        most = self.max_connections_per_address
        self._must(
            most is None or most >= 1,
            "max_connections_per_address",
            "must be 1 or more, or not set",
        )
        self._must_be_finite("shut_out_s")
        self._must_be_finite("head_timeout_s", "body_timeout_s", "idle_timeout_s", above_zero=True)


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
