"""The sockets between an executor and its ranks on other nodes.

The executor listens on its node's address until all its ranks have connected. Both sides prove that
they have the group's key, which Ray passes to the ranks, before anything received is parsed. After
that, messages are neither encrypted nor signed, like those of gloo and NCCL: the network between a
group's nodes must be private.
"""

import logging
import secrets
import socket
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from quire.cluster.seldom import SeldomWarning
from quire.worker.rank.lockstep import Rank, bound_waits

_log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_CONNECT_S = 60.0

# A node that vanishes is noticed after 25 s, with or without data to send.
_LIVENESS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A rank's first message."""

    rank: int
    pid: int
    host: str
    """The address of the rank's node."""
    store_port: int | None
    """On rank 0, the port of the store through which ranks find each other; else ``None``."""


@dataclass(frozen=True, kw_only=True)
class RemoteRank(Rank):
    host: str
    store_port: int | None

    def state(self) -> str:
        """Whether the rank's kernel acknowledges data, in words. That of a hung rank does; that of
        a rank that was cut off does not."""
        try:
            with socket.socket(fileno=socket.dup(self.connection.fileno())) as raw:
                info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
        except OSError:
            return "gone"
        num_retransmits = info[2]  # struct tcp_info: state, ca_state, retransmits, ...
        return "does not acknowledge" if num_retransmits else "acknowledges"

    def how_it_died(self) -> str | None:
        """How the connection ended; ``None`` while it is open. Only the rank's node knows more."""
        try:
            with socket.socket(fileno=socket.dup(self.connection.fileno())) as raw:
                said = raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            return f"was cut off: {error.strerror}"
        return None if said else "hung up"


class Reception:
    """The socket to which the ranks of one group connect, on a free port of ``host``."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = listen(host)
        self._warn = SeldomWarning(_log)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def accept(self, *, wait_s: float) -> RemoteRank | None:
        """The next rank that connects and has the key; ``None`` if none does within ``wait_s``."""
        self._listener.settimeout(wait_s)
        try:
            accepted, peer = self._listener.accept()
        except TimeoutError:
            return None
        try:
            connection = _wrap(accepted, _HANDSHAKE_S)
        except OSError:  # It has disconnected already.
            accepted.close()
            return None
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            hello = connection.recv()
            assert isinstance(hello, Hello)
        except (AuthenticationError, AssertionError, EOFError, OSError) as error:
            self._warn("turned away %s: %s: %s", peer[0], type(error).__name__, error)
            connection.close()
            return None
        return RemoteRank(
            number=hello.rank,
            pid=hello.pid,
            host=hello.host,
            store_port=hello.store_port,
            connection=connection,
        )

    def close(self) -> None:
        self._listener.close()


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of the address ``host`` only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)


def connect(address: tuple[str, int], key: bytes, hello: Hello) -> Connection:
    """Connects a rank to its executor. Receiving waits without limit, or until the executor's node
    is gone.

    Raises:
        OSError, EOFError, AuthenticationError: Nothing listens there, or it does not have the key.
    """
    connection = _wrap(socket.create_connection(address, timeout=_CONNECT_S), _CONNECT_S)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send(hello)
        bound_waits(connection, 0)
    except BaseException:
        connection.close()
        raise
    return connection


def _wrap(raw: socket.socket, timeout_s: float) -> Connection:
    raw.setblocking(True)
    for level, option, value in _LIVENESS:
        raw.setsockopt(level, option, value)
    connection = Connection(raw.detach())
    bound_waits(connection, timeout_s)
    return connection
