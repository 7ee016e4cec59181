"""Claims ports of this machine for one application.

Gateways of one application share their ports through SO_REUSEPORT. Gateways of two applications
would share a port as well, and each answer some of the other's clients. So each gateway binds a
socket to a name that contains its application and port, and looks for such names of others.

The names are Linux's abstract socket addresses: like ports, they belong to a network namespace, and
they disappear with their process. Other systems have none, and nothing is claimed there.
"""

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Callable
from pathlib import Path

from quire.cluster.config import ListenSettings
from quire.worker.request.errors import ConfigError

_TAKEN = Path("/proc/net/unix")
_CLAIM = re.compile(r" @quire-port/(\d+)/(\S+)/(\S+)/(\w+)/\d+$", re.MULTILINE)
_ANY_HOST = {"0.0.0.0", "::", ""}


def claim_ports(config: ListenSettings, *, owner: Callable[[], str]) -> contextlib.ExitStack:
    """Claims the gateway's ports, except port 0, until the returned stack is closed. ``owner``
    returns the claimant, as ``APPLICATION@CLUSTER``.

    Raises:
        ConfigError: Another application has one of the ports. None is claimed then.
    """
    with contextlib.ExitStack() as claims:
        for name in ("grpc_port", "http_port"):
            port = getattr(config, name)
            if port and _TAKEN.exists():
                _claim(claims, name, port, config.host, owner())
        return claims.pop_all()


def _claim(claims: contextlib.ExitStack, setting: str, port: int, host: str, owner: str) -> None:
    application = owner.partition("@")[0]
    # A socket's name has 107 bytes at most.
    cluster = f"{zlib.crc32(owner.encode()):08x}"
    place = "*" if host in _ANY_HOST else f"{zlib.crc32(host.encode()):08x}"
    claim = claims.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    claim.bind(f"\0quire-port/{port}/{place}/{application}/{cluster}/{os.getpid()}")
    # After its own claim: of two simultaneous gateways, at least one sees the other.
    for their_port, their_place, theirs, their_cluster in _CLAIM.findall(_TAKEN.read_text()):
        is_same_place = place == their_place or "*" in (place, their_place)
        if int(their_port) == port and is_same_place and their_cluster != cluster:
            raise ConfigError(
                f"{setting}={port}: the application {theirs!r} has this port of the gateway's "
                "machine; take another, or 0 for any free one"
            )
