"""Starts a Ray cluster on this machine, or connects to a running one.

When `ray_session` ends for any reason, everything that it started is gone; a cluster that ran
before is left as it was.
"""

import atexit
import contextlib
import errno
import itertools
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.config import ListenSettings
from quire.cluster.deploy import ray_private
from quire.cluster.deploy.kept_logs import addresses_here, kept, logs_named, note_address
from quire.cluster.deploy.line import PATH, Line
from quire.cluster.deploy.processes import descendants, end_all_with, finished, kill
from quire.cluster.deploy.session import OthersCluster, OwnNode, RaySession
from quire.cluster.deploy.signals import ended_by_signal, ray_leaves_signals_alone
from quire.cluster.errors import StartFailed
from quire.worker.request.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import psutil

_log = logging.getLogger(__name__)

# Ray and Serve read these when they start, and their processes inherit them. Values in the user's
# environment take precedence.
_ENVIRONMENT = {
    # Streams do not pass through Serve's ingress: waiting for it would only delay a stop.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # How often Serve checks its replicas. Its default of 0.1 s takes a quarter of an idle cluster's
    # CPU time. Streams do not depend on it; the start of a group does.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts its workers at niceness 15: groups and gateways, for which clients wait, would only
    # get the CPU time that all other processes of the node leave.
    "RAY_worker_niceness": "0",
}
_CONNECT_S = 5.0
# A socket's path has at most 107 characters, of which Ray's names and Quire's take 81.
_MAX_TEMP_CHARS = 26
_START_ATTEMPTS = 3
_STARVED_S = 30.0  # How long Ray waits for a raylet.
_START_TIMEOUT_S = 600.0
_LAST_WORDS = 1000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TOLD = re.compile(r"\[.* [CE] \d+ \d+\]")
"""The beginning of an error's line in a log of Ray's core."""
_REMOVALS = 50
_SHUTDOWN_S = 10.0  # Limit of Ray's own stop, which waits without limit for a GCS that is gone.
_WITHOUT_GCS_S = 60  # How long Ray's processes survive without GCS, plus the time of the drain.
_OBJECT_STORE_BYTES = 80 * 2**20  # Close to Ray's minimum, because Quire has no large objects.


@contextlib.contextmanager
def ray_session(
    *, address: str | None = None, drain_timeout_s: float = 0.0
) -> Iterator[RaySession]:
    """Connects to the Ray cluster at ``address``, or starts one here and stops it at the end.

    SIGINT, SIGTERM and SIGHUP end the block as Ctrl-C does, from before anything is started until
    all of it is gone. A started cluster survives its GCS by more than ``drain_timeout_s``.
    """
    _set_environment()
    import ray
    from ray import serve

    ray_private.check_ray()
    # Serve's threads for autoscaled deployments call Ray even after the end: each call would
    # connect again, or start another cluster.
    ray_private.CONNECTS_BY_ITSELF.put(False)
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger(serve.__name__).setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signal())
        if address is not None:
            _check_address(address)
            stack.callback(_shut_down)
            if address.startswith("127."):  # Started as below, with this user's token.
                stack.enter_context(_on_the_loopback())
                use_token = ray_private.USE_TOKEN.get()
                if use_token is not None:
                    use_token(warn_if_disabled=False)
            with ray_leaves_signals_alone():
                _connect(address)
            session = _others_cluster()
            if session.logs is not None:
                place = f"{session.logs} on the node of each part"
                # A command's wrong argument is not in the logs.
                stack.enter_context(logs_named(place, but=(ConfigError, CheckpointError)))
            yield session
            return
        # A folder of its own, with a short path for the sockets in it, and removed with the
        # cluster. Ray makes its folder readable for all users, so it gets one inside.
        is_short = len(tempfile.gettempdir()) <= _MAX_TEMP_CHARS
        private = Path(tempfile.mkdtemp(prefix="quire-", dir=None if is_short else "/tmp"))
        stack.callback(_remove, private)
        folder = private / "r"
        logs = folder / "session_latest" / "logs"
        kept_logs = stack.enter_context(kept(logs))
        stack.enter_context(logs_named(kept_logs))
        line = stack.enter_context(Line(private / "line"))
        stack.enter_context(_environment(PATH, str(line.path)))
        # Ray's agents make a folder here when they no longer find a GCS.
        stack.enter_context(_environment("RAY_TMPDIR", str(private)))
        below: list[psutil.Process] = []  # The raylet's descendants before the stop.
        stack.callback(end_all_with, f"{PATH}={line.path}", below)
        stack.callback(_shut_down)
        stack.enter_context(_on_the_loopback())
        with ray_leaves_signals_alone():
            _start_node(folder, without_gcs_s=_WITHOUT_GCS_S + math.ceil(drain_timeout_s))
        note_address(kept_logs, ray.get_runtime_context().gcs_address)
        pids = _pids()
        stack.callback(lambda: below.extend(descendants(pids["raylet"])))
        yield OwnNode(logs=logs / "serve", kept_logs=kept_logs, line=line, pids=pids)


def resources_here() -> Mapping[str, float] | None:
    """The resources of a Ray node that would start on this machine; ``None`` if they are not known
    before it has started."""
    _set_environment()
    known = ray_private.RESOURCES.get()
    return None if known is None else known().resolve(is_head=True).to_resource_dict()


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _remove(folder: Path) -> None:
    """Removes a folder. Retries, because a hung part of Ray in this process may write to it."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _shut_down() -> None:
    """Disconnects from Ray, and stops the node if this process started it. Gives up if that
    hangs."""
    import ray

    # Serve distinguishes clusters by job number, which is 1 in each cluster started here.
    forget_client = ray_private.FORGET_CLIENT.get()
    if forget_client is not None:
        forget_client(None)
    # Serve's threads lose the connection to Ray meanwhile; their errors mean nothing.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    end_s = time.monotonic() + _SHUTDOWN_S
    if not finished(ray.shutdown, unless=lambda: time.monotonic() > end_s):
        atexit.unregister(ray.shutdown)  # It would hang as well.


def _others_cluster() -> OthersCluster:
    node = ray_private.GLOBAL_NODE.get()
    if node is None:  # Connected through a proxy, so the addresses are unknown.
        return OthersCluster(gcs=None, raylet=None)
    logs = Path(node.get_logs_dir_path()) / "serve"
    return OthersCluster(gcs=node.gcs_address, raylet=node.raylet_socket_name, logs=logs)


def _pids() -> dict[str, int]:
    node = ray_private.GLOBAL_NODE.get()
    if node is None:
        return {}
    kinds = {"raylet": "raylet", "GCS": "gcs_server"}
    return {
        name: each.process.pid
        for name, kind in kinds.items()
        for each in getattr(node, "all_processes", {}).get(kind, [])
    }


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = previous


def _connect(address: str) -> None:
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:  # ValueError: the address is malformed.
        raise ConfigError(
            f"ray_address={address!r}: no Ray cluster is there, or it wants a token "
            f"({error}); `ray start --head` starts one, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
            "must be as on its head, and without an address a cluster is started for you"
        ) from error


def _start_node(folder: Path, *, without_gcs_s: int) -> None:
    """Starts a Ray node that keeps its files in ``folder``. Retries if the raylet does not start.

    A raylet must report within half a minute that it runs, and some never do, for example because
    another process took its port. Ray then leaves the processes that it has started behind. On a
    loaded machine a raylet only takes longer: then there are more attempts.

    Raises:
        ConfigError: Ray cannot keep its token.
        StartFailed: No raylet ran.
    """
    import psutil  # Ray brings it.
    import ray

    us = psutil.Process()
    begin_s, num_failed = time.monotonic(), 0
    for attempt in itertools.count(1):
        attempt_s = time.monotonic()
        before = us.children()
        try:
            ray.init(
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder),
                _system_config={"gcs_rpc_server_reconnect_timeout_s": without_gcs_s},
            )
        except BaseException as error:
            # Also after a signal: a process that outlives the folder would create it again.
            started = [child for child in us.children() if child not in before]
            is_late = time.monotonic() - attempt_s >= _STARVED_S and _has_raylet(started)
            ray.shutdown()  # An orderly end, if all processes had started.
            kill(started)
            node = _half_started(error)
            if node is not None:
                node.kill_all_processes(check_alive=False)  # Notices that they are gone.
            if node is None and isinstance(error, OSError):
                raise ConfigError(
                    f"Ray cannot keep its token in ~/.ray ({error}): set HOME to a folder that can "
                    "be written"
                ) from error
            if node is None or not isinstance(error, Exception):
                raise
            num_failed += not is_late
            is_over = time.monotonic() - begin_s > _START_TIMEOUT_S
            if num_failed == _START_ATTEMPTS or is_over:
                raise StartFailed(
                    f"no Ray node of this machine's own started in {attempt} attempts "
                    f"({error}); is the machine short of memory or processors, or /dev/shm full? "
                    f"The raylet's last words: {_last_words(folder)}"
                ) from error
            _log.warning("a Ray node did not start (%s): starting another", error)
        else:
            return


def _has_raylet(started: "Sequence[psutil.Process]") -> bool:
    """Whether the raylet among the processes ``started`` still runs."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return any(
            each.name() == "raylet" and each.status() != psutil.STATUS_ZOMBIE for each in started
        )
    return False


def _half_started(error: BaseException) -> Any:
    """The node whose start ended with ``error``, which only the error's traceback refers to."""
    node_type = ray_private.NODE.get()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, node_type):
            return node
    return None


def _last_words(folder: Path) -> str:
    logs = folder / "session_latest" / "logs"
    text = "".join(
        log.read_text(errors="replace")
        for name in ("raylet.out", "raylet.err")
        if (log := logs / name).exists()
    )
    lines = [line for line in _COLOURS.sub("", text).splitlines() if _TOLD.match(line)]
    return ("\n".join(lines) or text)[-_LAST_WORDS:].strip() or "none"


@contextlib.contextmanager
def _on_the_loopback() -> Iterator[None]:
    """Makes Ray listen only on 127.0.0.1 while the block runs.

    Ray replaces any name of the loopback by the machine's address. It listens on 127.0.0.1 alone if
    its setting for clusters of several machines is off, as on a laptop's system.
    """
    with ray_private.HAS_CLUSTERS.replaced(False):
        yield


def found_address(given: str) -> str:
    """The address of the Ray cluster that ``given`` stands for. "auto" is the cluster of
    ``RAY_ADDRESS``, else of the newest `quire serve` on this machine, else the one of which this
    machine is a node. Ray's own search for "auto" may wait for minutes.

    Raises:
        ConfigError: There is none.
    """
    if given != "auto":
        return given
    named = os.environ.get("RAY_ADDRESS", "auto")
    if named not in ("", "auto"):
        return named
    if here := addresses_here():
        return here[0]
    noted = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        address = noted.read_text(encoding="utf-8").strip()
        _check_address(address)
    except (OSError, ConfigError):
        raise ConfigError(
            "ray_address='auto': no `quire serve` runs on this machine, and no Ray cluster has it "
            "as a node; give the address that `quire serve` printed, or `ray start` one"
        ) from None
    return address


def _check_address(address: str) -> None:
    """Raises ConfigError: nothing answers at ``address``. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "/" in host:
        return  # "auto", or another form of address that only Ray understands.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address={address!r}: nothing answers there ({error}); give the address of a "
            "Ray cluster's head, or 'auto' on one of its nodes"
        ) from error


def is_only_node() -> bool:
    """Whether this machine is the only node of the Ray cluster that this process is connected
    to."""
    import ray

    if ray_private.GLOBAL_NODE.get() is None:  # Connected through a proxy, from any machine.
        return False
    nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    return nodes == [ray.get_runtime_context().get_node_id()]


def check_ports(config: ListenSettings) -> None:
    """Raises ConfigError: another process listens on a port of the gateways.

    Gateways share their ports through SO_REUSEPORT, which would also let two servers share one.
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
