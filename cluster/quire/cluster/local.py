"""A Ray cluster on this machine, or a connection to one that is there.

What `ray_session` started is gone when it ends, whatever ended it; a cluster that was there
before is left as it was.
"""

import contextlib
import errno
import logging
import os
import socket
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cluster.config import ClusterConfig
from quire.cluster.errors import StartFailed
from quire.cluster.signals import ended_by_signal, ray_leaves_signals_alone
from quire.worker.errors import ConfigError

if TYPE_CHECKING:
    import psutil
    from ray._private.node import Node

_log = logging.getLogger(__name__)

# Ray and Serve read these as they start, and their processes inherit them. What the user's own
# environment says of them holds.
_ENVIRONMENT = {
    # Streams do not pass through Serve's own ingress: waiting for it would only delay a stop.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers at niceness 15: groups and gateways, whom clients wait for, would have
    # what every other process of the node leaves.
    "RAY_worker_niceness": "0",
}
_CONNECT_S = 5.0
_START_ATTEMPTS = 3
_LAST_WORDS = 1000
_KILLED_S = 10.0  # Until a killed process is gone, unless it hangs in the kernel.
_OBJECT_STORE_BYTES = 80 * 2**20  # Close to Ray's minimum: no object of ours is large.


@contextlib.contextmanager
def ray_session(*, address: str | None = None) -> Iterator[Path | None]:
    """Connects to the Ray cluster at ``address``, or starts one here and stops it at the end.

    Yields where what Serve runs on one of its own logs. SIGTERM and SIGHUP end the block as Ctrl-C
    does, from before anything is started until all of it is gone.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger(serve.__name__).setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signal())
        if address is not None:
            _check_address(address)
            stack.callback(ray.shutdown)
            with ray_leaves_signals_alone():
                _connect(address)
            yield None
            return
        # A folder of our own: short, for the sockets in it, and gone with the cluster.
        own = tempfile.TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(own))
        stack.callback(ray.shutdown)
        stack.enter_context(_on_the_loopback())
        with ray_leaves_signals_alone():
            _start_node(folder)
        yield folder / "session_latest" / "logs" / "serve"


def _connect(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:  # ValueError: it is no address.
        raise ConfigError(
            f"ray_address={address!r}: no Ray cluster is there ({error}); `ray start --head` "
            "starts one, and without an address one is started for you"
        ) from error


def _start_node(folder: Path) -> None:
    """Starts a Ray node that keeps its files in ``folder``.

    A raylet has half a minute in which to say that it is there, and some never do, as when another
    process has taken a port that was found free for it. Ray then leaves what it had started behind.
    """
    import psutil  # Ray brings it.
    import ray

    us = psutil.Process()
    for attempt in range(_START_ATTEMPTS):
        before = us.children()
        try:
            ray.init(
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
            )
        except BaseException as error:
            # Also where a signal came. What is still alive when the folder goes makes it anew.
            started = [child for child in us.children() if child not in before]
            ray.shutdown()  # In order, where all of it was there already.
            _kill(started)
            node = _half_started(error)
            if node is not None:
                node.kill_all_processes(check_alive=False)  # Sees that they are gone.
            if node is None or not isinstance(error, Exception):
                raise
            if attempt == _START_ATTEMPTS - 1:
                raise StartFailed(
                    f"no Ray node of this machine's own started in {_START_ATTEMPTS} attempts "
                    f"({error}); is the machine short of memory or processors, or /dev/shm full? "
                    f"The raylet's last words: {_last_words(folder)}"
                ) from error
            _log.warning("a Ray node did not start (%s): starting another", error)
        else:
            return


def _half_started(error: BaseException) -> "Node | None":
    """The node whose start ended with ``error``, of which its traceback alone still knows."""
    from ray._private.node import Node

    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            return node
    return None


def _kill(started: "Iterable[psutil.Process]") -> None:
    """Kills also what they started, which would notice a minute later that they are gone."""
    import psutil

    found, unseen = [], list(started)
    while unseen:
        process = unseen.pop()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()  # It starts nothing more behind our back.
            unseen += process.children()
            found.append(process)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=_KILLED_S)


def _last_words(folder: Path) -> str:
    logs = folder / "session_latest" / "logs"
    text = "".join(
        log.read_text(errors="replace")
        for name in ("raylet.out", "raylet.err")
        if (log := logs / name).exists()
    )
    return text[-_LAST_WORDS:].strip() or "none"


@contextlib.contextmanager
def _on_the_loopback() -> Iterator[None]:
    """Nothing of a cluster of this machine's own is for the network.

    Ray takes any name of the loopback for a wish to be reached, and puts the machine's address in
    its place; it listens on 127.0.0.1 alone where it is told, as on a laptop's system, that there
    are no clusters of several machines.
    """
    from ray._private import ray_constants

    previous = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = previous


def _check_address(address: str) -> None:
    """Ray itself tries for minutes, and says so in its own words."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "/" in host:
        return  # "auto", or a kind of address that only Ray understands.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address={address!r}: nothing answers there ({error}); give the address of a "
            "Ray cluster's head, or 'auto' on one of its nodes"
        ) from error


def check_ports(config: ClusterConfig) -> None:
    """Raises ConfigError where something else listens on a port that a gateway is to have.

    Gateways share their ports through SO_REUSEPORT, which would let two servers share one too.
    """
    for name in ("grpc_port", "http_port"):
        port = getattr(config, name)
        with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    raise ConfigError(
                        f"host={config.host!r}: not an address of this machine "
                        f"({error.strerror}); 0.0.0.0 is all that it has"
                    ) from error
                raise ConfigError(
                    f"{name}={port}: cannot listen on {config.host}: {error.strerror}; take "
                    "another port, or 0 for any free one"
                ) from error
