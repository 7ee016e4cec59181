"""Makes signals end `with` blocks in order, as Ctrl-C does, in spite of Ray's own handling.

Ray has a SIGTERM handler in Python and another one in its C++ core, and its processes are in this
process's group. Each of these alone would leave parts of a cluster behind.
"""

import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from quire.cluster.deploy import ray_private


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt, so that `with` blocks end as they do
    on Ctrl-C. SIGHUP stays ignored if it was (``nohup``). SIGINT is handled even if it was ignored,
    as shells do for background processes of scripts. In threads other than the main one this does
    nothing, because only that one can set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with _handled(dict.fromkeys(numbers, _interrupt)):
        yield


@contextlib.contextmanager
def ray_leaves_signals_alone() -> Iterator[None]:
    """Prevents Ray from taking over signals while it starts or connects in the block."""
    # Ray's SIGTERM handler would end Ray's processes, but not their children, and exit.
    with (
        ray_private.SET_SIGTERM_HANDLER.replaced(_do_nothing),
        contextlib.ExitStack() as stack,
    ):
        # An interrupted connect would crash the process at its end.
        connect = ray_private.CONNECT
        if connect.get() is not None:
            stack.enter_context(connect.replaced(_in_one_piece(connect.get())))
        # A closing terminal and ``timeout`` signal the whole process group. Ray's head would be
        # gone at once, with nothing drained, and this process would look for it for a minute. On
        # systems where a process cannot be bound to the life of another, Ray needs the group to end
        # its processes.
        binds, popen = ray_private.BINDS_LIVES.get(), ray_private.POPEN.get()
        if sys.platform == "linux" and binds is not None and popen is not None and binds():
            apart = functools.partial(popen, process_group=0)
            stack.enter_context(ray_private.POPEN.replaced(apart))
        yield


def _in_one_piece(function: Any) -> Any:
    """Wraps ``function``: a signal that arrives while it runs raises KeyboardInterrupt after it; a
    second signal raises at once."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **options)
        came: list[int] = []

        def note(number: int, frame: object) -> None:
            # Cancels the alarm of Ray's core, which would abort this process in three seconds.
            signal.alarm(0)
            came.append(number)
            if len(came) > 1:
                raise KeyboardInterrupt

        handlers = {
            number: note
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if callable(signal.getsignal(number))
        }
        # Its end also replaces the handlers that Ray's core has installed below Python's.
        with _handled(handlers):
            result = function(*args, **options)
        if came:
            raise KeyboardInterrupt
        return result

    return run


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _do_nothing(*_: object) -> None:
    pass
