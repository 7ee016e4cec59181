"""A tensor-parallel rank, a process: ``python -m quire.worker.ranks.rank CONTROL LIFELINE SHARED``
(fds).

Speaks with its executor over one socket (`quire.worker.ranks.messages`), and finds its steps in
memory that all share (`quire.worker.step.codec`).
It ends when the executor does, however that ends: the other end of the lifeline closes then, and
a thread that watches it ends the process even in the middle of a step.
"""

import os
import select
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from quire.worker.ranks.loop import failed, run_steps
from quire.worker.ranks.messages import RankStart
from quire.worker.step.codec import StepSlots, pack, read_step, unpack, write_output


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the executor, which decides.
    control_fd, lifeline_fd, shared_fd = (int(arg) for arg in sys.argv[1:])
    threading.Thread(target=_watch, args=(lifeline_fd, os.getppid()), daemon=True).start()
    with Connection(control_fd) as connection:
        try:
            _run(connection, shared_fd)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # The executor closed its end.
        except BaseException as error:
            with suppress(OSError):
                connection.send(failed(error))
    # Skips the teardown of torch and of its process group, which would wait for other ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(connection: Connection, shared_fd: int) -> None:
    start = connection.recv()
    assert isinstance(start, RankStart)
    # Here and not above: the lifeline must be watched before the slow imports begin.
    from quire.worker.model.tensor_parallel import join
    from quire.worker.runner.model_runner import pick_device

    device = pick_device(start.config, rank=start.rank)
    tp = join(
        rank=start.rank,
        size=start.config.tensor_parallel_size,
        device=device,
        rendezvous=start.rendezvous,
        shared_fd=shared_fd,
    )
    slots = StepSlots(shared_fd, offset=start.slots_offset, slot_bytes=start.slot_bytes)
    run_steps(
        connection,
        start.config,
        device=device,
        tp=tp,
        read=lambda number, data: read_step(slots.step(number), unpack(data)),
        write=lambda number, output: pack(write_output(output, slots.output(number))),
    )


def _watch(lifeline_fd: int, parent_pid: int) -> None:
    """Ends the process when the executor's end of the lifeline closes.

    The parent's id is a second sign, for when a child that it forked still holds that end.
    """
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN | select.POLLHUP)
    while not poll.poll(1000) and os.getppid() == parent_pid:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
