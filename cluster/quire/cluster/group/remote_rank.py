"""A tensor-parallel rank on another node than its executor, or on the same one: any process.

Steps arrive over one socket, whole (`quire.worker.step.codec`), and rank 0's outputs leave by it.
The process ends when the socket's other end closes or falls silent, even in the middle of a step.
"""

import fcntl
import os
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import NoReturn

from quire.cluster.group.rank_socket import Hello, connect, listen
from quire.worker.api.config import EngineConfig
from quire.worker.ranks.loop import failed, run_steps
from quire.worker.step.codec import output_message, pack, step_from_bytes

_FAREWELL_S = 10.0
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteStart:
    """The executor's first message."""

    config: EngineConfig
    store: tuple[str, int]
    """Where rank 0 keeps what the ranks need to find each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRankTask:
    """Everything that the process needs to become a rank."""

    rank: int
    ranks_per_node: int
    executor: tuple[str, int]
    key: bytes = field(repr=False)


def run_rank(task: RemoteRankTask, *, host: str) -> NoReturn:
    """Is rank ``task.rank`` until its executor leaves, then ends the process. ``host`` is the
    address of this node."""
    # Listens on the one address where torch's own store would listen on all.
    listener = listen(host) if task.rank == 0 else None
    hello = Hello(
        rank=task.rank,
        pid=os.getpid(),
        host=host,
        store_port=listener.getsockname()[1] if listener else None,
    )
    connection = connect(task.executor, task.key, hello)
    threading.Thread(target=_watch, args=(connection.fileno(),), daemon=True).start()
    try:
        _run(connection, task, host, listener)
    except (EOFError, ConnectionError, TimeoutError):
        pass  # The executor has gone.
    except BaseException as error:
        with suppress(OSError):
            connection.send(failed(error))
        # It hangs up when it has read that. Hanging up first, with steps unread, would reset
        # the connection, and the message could be lost.
        time.sleep(_FAREWELL_S)
    os._exit(0)


def _run(
    connection: Connection, task: RemoteRankTask, host: str, listener: socket.socket | None
) -> NoReturn:
    start = connection.recv()
    assert isinstance(start, RemoteStart)
    interface = _interface_of(host)
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    # Here and not above: the socket must be watched before the slow imports begin.
    import torch

    from quire.worker.model.hub import fetch_checkpoint
    from quire.worker.model.tensor_parallel import join_over_network
    from quire.worker.runner.model_runner import pick_device

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(start.config.num_threads or max(1, cores // task.ranks_per_node))
    # Ray shows an actor its own GPU alone.
    device = pick_device(start.config, rank=0, num_ranks=1)
    tp = join_over_network(
        rank=task.rank,
        size=start.config.tensor_parallel_size,
        device=device,
        store=start.store,
        listener=listener,
    )
    run_steps(
        connection,
        replace(start.config, model=fetch_checkpoint(start.config.model)),
        device=device,
        tp=tp,
        read=lambda _, data: step_from_bytes(data),
        write=lambda _, output: pack(output_message(output)),
    )


def _watch(fd: int) -> None:
    """Ends the process when the executor's end of the socket closes or is out of reach."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address, for libraries that want a name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # It has none.
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
