"""Signals end blocks in their order, as Ctrl-C does, whatever Ray would do about them itself.

Ray has a handler for SIGTERM in Python and one below it, in its core, and its processes are in our
process group. Each of them alone would leave something of a cluster behind.
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
    on Ctrl-C. A process that is to survive a closing terminal (``nohup``) still does; SIGINT counts
    also where it was ignored, as shells have it for what a script starts in the background. Only a
    process's main thread can: in others nothing changes."""
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
    """While Ray starts or connects, which is when it takes signals for itself."""
    # It would end its processes, but not what those started, and exit.
    with (
        ray_private.SET_SIGTERM_HANDLER.replaced(_do_nothing),
        contextlib.ExitStack() as stack,
    ):
        # Half a connection crashes the process when that ends.
        connect = ray_private.CONNECT
        if connect.get() is not None:
            stack.enter_context(connect.replaced(_in_one_piece(connect.get())))
        # A terminal that closes and ``timeout`` signal the whole group of ours. Ray's head would be
        # gone at once, with nothing drained, and we would look for it for a minute. Where no
        # process can be bound to the life of another, Ray ends them by their group.
        binds, popen = ray_private.BINDS_LIVES.get(), ray_private.POPEN.get()
        if sys.platform == "linux" and binds is not None and popen is not None and binds():
            apart = functools.partial(popen, process_group=0)
            stack.enter_context(ray_private.POPEN.replaced(apart))
        yield


def _in_one_piece(function: Any) -> Any:
    """``function``, after which a signal raises KeyboardInterrupt that came while it ran; a second
    one does not wait."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **options)
        came: list[int] = []

        def note(number: int, frame: object) -> None:
            # Ray's core, where it heard of it first, would abort us three seconds from now.
            signal.alarm(0)
            came.append(number)
            if len(came) > 1:
                raise KeyboardInterrupt

        handlers = {
            number: note
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if callable(signal.getsignal(number))
        }
        # At its end our handlers are in the place again that Ray's core has taken below Python's.
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
