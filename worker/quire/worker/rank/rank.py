"""A tensor-parallel rank: a process that runs steps received from its executor over a connection.

As a child of its executor it is ``python -m quire.worker.rank.rank CONNECTION SHARED`` (fds). On
several nodes, the launcher starts the process in another way, and the process calls `run_rank`. The
rank ends when the executor ends, however that happens, or is unreachable: a thread watches the
connection and ends the process even in the middle of a step.
"""

import gc
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from quire.worker.rank.codec import StepSlots, pack, unpack
from quire.worker.rank.host_memory import map_host_blocks
from quire.worker.rank.messages import Allocate, Failed, Loaded, RankStart, Ready
from quire.worker.request.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # Slow to import, and a rank must first watch its executor.
    from quire.worker.rank.late_tokens import Pending

_FAREWELL_S = 10.0


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The executor handles Ctrl-C.
    connection_fd, shared_fd = (int(arg) for arg in sys.argv[1:])
    run_rank(Connection(connection_fd), shared_fd=shared_fd, parent_pid=os.getppid())


def run_rank(
    connection: Connection,
    *,
    shared_fd: int | None = None,
    listener: socket.socket | None = None,
    parent_pid: int | None = None,
) -> NoReturn:
    """Runs a rank until its executor is gone, then ends the process.

    ``shared_fd`` is memory that all ranks of one node share with the executor. On several nodes
    rank 0 has a ``listener`` at the address where the ranks meet.
    """
    watched = (connection.fileno(), parent_pid)
    threading.Thread(target=_watch, args=watched, daemon=True).start()
    try:
        _run(connection, shared_fd, listener)
    except (EOFError, ConnectionError, TimeoutError):
        pass  # The executor has gone.
    except BaseException as error:
        with suppress(OSError):
            connection.send(failed(error))
        # The executor ends this process, or closes the connection, when it has read the message.
        # If the rank closed first, with steps unread, the reset could lose the message.
        time.sleep(_FAREWELL_S)
    # Skips the teardown of torch and of its process group, which would wait for other ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(connection: Connection, shared_fd: int | None, listener: socket.socket | None) -> NoReturn:
    """Loads the rank's share of the model and runs steps forever.

    Raises:
        EOFError, OSError: The executor is gone.
    """
    start = connection.recv()
    assert isinstance(start, RankStart)
    # Imported here: the executor must be watched before the slow imports begin.
    import torch

    from quire.worker.model.hub import fetch_checkpoint
    from quire.worker.rank.collectives import join
    from quire.worker.rank.runner import ModelRunner, pick_device

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(start.config.num_threads or max(1, cores // start.num_on_node))
    if shared_fd is None:
        device = pick_device(start.config, rank=0, num_ranks=1)  # Ray exposes only its own GPU.
    else:
        device = pick_device(start.config, rank=start.rank)
    tp = join(
        rank=start.rank,
        size=start.config.tensor_parallel_size,
        device=device,
        store=start.store,
        listener=listener,
        shared_fd=shared_fd,
    )
    config = replace(start.config, model=fetch_checkpoint(start.config.model))
    runner = ModelRunner(config, device=device, tp=tp)
    num_blocks = runner.num_blocks_that_fit()
    is_gpu = device.type == "cuda"
    connection.send(
        Loaded(
            num_blocks=num_blocks,
            is_gpu=is_gpu,
            numerics=runner.numerics,
            kv_format=runner.kv_format,
            num_host_blocks=runner.num_host_blocks,
        )
    )
    allocate = connection.recv()
    assert isinstance(allocate, Allocate)
    host_blocks_XC = map_host_blocks(
        runner.kv_format,
        num_slots=allocate.num_host_blocks,
        fd=shared_fd,
        offset=allocate.host_offset,
    )
    runner.allocate(allocate.num_blocks, host_blocks_XC)
    gc.collect()
    gc.freeze()  # A full collection scanned all loaded objects while every rank waited.
    connection.send(Ready())

    slots = StepSlots(start.slot_bytes, shared_fd=shared_fd, offset=start.slots_offset)
    answers = Answers(connection, slots, in_thread=is_gpu)

    def receive() -> Any:
        return unpack(connection.recv_bytes())

    for number in itertools.count():
        pending = runner.launch(slots.read_step(number, receive()), edits=receive)
        if pending is not None:
            answers.add(number, pending)
    raise AssertionError("numbers do not end")


class Answers:
    """Sends rank 0's outputs in the order of their steps.

    ``in_thread``: a thread waits for the device, so that the next step can be launched.
    """

    def __init__(
        self,
        connection: Connection,
        slots: StepSlots,
        *,
        in_thread: bool,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """``end`` ends the process if the thread fails."""
        self._connection = connection
        self._slots = slots
        self._end = end
        self._thread = ThreadPoolExecutor(1, "quire-answers") if in_thread else None

    def add(self, number: int, pending: "Pending") -> None:
        """Sends the output of step ``number`` once it is ready."""
        if self._thread is None:
            self._send(number, pending)
        else:
            self._thread.submit(self._send_or_end, number, pending)

    def _send(self, number: int, pending: "Pending") -> None:
        self._connection.send_bytes(pack(self._slots.write_output(number, pending.wait())))

    def _send_or_end(self, number: int, pending: "Pending") -> None:
        try:
            self._send(number, pending)
        except BaseException as error:
            with suppress(OSError):
                self._connection.send(failed(error))
            self._end(1)


def failed(error: BaseException) -> Failed:
    """The message for the exception that ends a rank."""
    kind = type(error)
    # Subclasses are sent as the base class that a caller can handle.
    name = next((k.__name__ for k in (ConfigError, CheckpointError) if issubclass(kind, k)), None)
    return Failed(
        kind=name or kind.__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )


def _watch(fd: int, parent_pid: int | None) -> None:
    """Ends the process when the executor's end of the connection closes or is unreachable.

    The parent's id is checked too: a child forked by the executor may keep that end open.
    """
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    while not poll.poll(1000) and parent_pid in (None, os.getppid()):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
