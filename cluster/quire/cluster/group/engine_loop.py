"""Runs an engine in its own thread, for use from asyncio.

Only that thread touches the engine: commands from asyncio go through an inbox that is emptied
before each step, and a step's outputs come back in one `call_soon_threadsafe`, in order. Without
work the thread sleeps on the inbox. When a rank fails the thread ends, every request gets the
error, and `failed` is done; the group must then be replaced. The same happens when a step exceeds
its deadline (`EngineLoop.watch`); later outputs of that thread are dropped.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quire.cluster.supervise import keep_going
from quire.worker.blocks.events import BlockEvent, EventBatch
from quire.worker.blocks.hashing import BlockHashes
from quire.worker.blocks.kv_format import KvFormat
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.loan import Loan
from quire.worker.request.engine_stats import EngineStats
from quire.worker.request.errors import InvalidRequest, QueueFull, QuireError, RankFailure
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared

_log = logging.getLogger(__name__)

_MAX_INBOX = 65_536
"""Commands that may wait for the engine's thread: many times the number of requests that gateways
may have in progress."""
_LOOKS_IN = 8  # Checks of the thread within a step's deadline.

ENGINE_THREAD = "quire-engine"
"""The name of the engine's thread and, on Linux, of the OpenMP threads that it starts."""

T = TypeVar("T")
Sink = Callable[[TokenDelta | QuireError], None]
"""Takes a request's outputs, or the error that ended it. Called from the event loop."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outputs of one turn of the engine's thread."""

    num_steps: int
    """Steps since the start."""
    stats: EngineStats
    outputs: list[TokenDelta]
    refusals: list[tuple[str, QuireError]]
    """Ids of requests that the engine refused, and why."""
    events: EventBatch
    num_added: int
    """Requests added to the engine since the start, before this step."""


class EngineLoop:
    """Runs ``engine`` until `close`. It is made and used inside the event loop that it reports
    to."""

    def __init__(self, engine: GroupEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._listeners: list[Callable[[StepResult], None]] = []
        self._refusals: list[tuple[str, QuireError]] = []
        self._events: list[BlockEvent] = []
        self.num_steps = 0
        self._num_turns = 0
        self._num_added = 0  # Belongs to the engine's thread.
        self.num_submitted = self.num_added = 0
        """Requests since the start; and how many of them, in order, `stats` counts."""
        self._is_closed = False
        self._is_idle = False  # Whether the thread waits for work.
        self._watchdog: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._hung: asyncio.Future[None] = self._loop.create_future()
        self.stats = engine.stats()
        """The engine's statistics after the last step."""
        self.contents = engine.events.contents
        """The contents of blocks, which other threads may read; ``None`` if they are not kept."""
        self.failed: asyncio.Future[RankFailure] = self._loop.create_future()
        engine.events.subscribe(lambda _seq, event: self._events.append(event))
        self._start()

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._sinks)

    def submit(self, request: Prepared, sink: Sink) -> None:
        """Gives the engine a request. ``sink`` gets its outputs, or the error that ended it.

        It gets an error at once if the engine has failed or is closed, or too many commands wait.
        """
        if (error := self._why_not()) is not None:
            sink(error)
            return
        self._sinks[request.request_id] = sink
        self.num_submitted += 1
        self._inbox.put(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        """Ends a request; its sink gets nothing more. Unknown and ended requests are ignored."""
        if self._sinks.pop(request_id, None) is not None:
            self._inbox.put(lambda: self._engine.abort(request_id))

    async def call(self, function: Callable[[GroupEngine], T]) -> T:
        """Runs ``function`` in the engine's thread between two steps.

        Raises:
            RankFailure: The engine failed, or was closed, before ``function`` had run.
            QueueFull: Too many commands wait for the engine.
        """
        if (error := self._why_not()) is not None:
            raise error
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            result = function(self._engine)
            self._post(lambda: None if future.done() else future.set_result(result))

        self._inbox.put(run)
        ends: set[asyncio.Future[Any]] = {future, self.failed, self._ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            future.cancel()
            raise self.failed.result() if self.failed.done() else _closed()
        return future.result()

    def lend_kept(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | None:
        """Lends ``hashes`` without waiting for a step; ``None`` if host memory lacks any of
        them."""
        if self._why_not() is not None:
            return None
        loan = self._engine.lend_kept(hashes, borrower_format=borrower_format)
        if loan is not None:
            self._inbox.put(lambda: None)  # Wakes the engine, which takes returned slots back.
        return loan

    def _why_not(self) -> QuireError | None:
        """The error if the engine takes no more commands; ``None`` if it does."""
        if self.failed.done():
            return self.failed.result()
        if self._is_closed or self._ended.done():
            return _closed()
        num_waiting = self._inbox.qsize()
        if num_waiting >= _MAX_INBOX:
            return QueueFull(f"{num_waiting} commands wait for the engine, {_MAX_INBOX} at most")
        return None

    def listen(self, on_step: Callable[[StepResult], None]) -> Callable[[], None]:
        """Calls ``on_step`` after each step, after the sinks; returns a function that stops it."""
        self._listeners.append(on_step)
        return lambda: self._listeners.remove(on_step)

    def watch(self, *, step_deadline_s: float) -> None:
        """Fails the group when a step takes longer than ``step_deadline_s``, from now on.

        Call it after the engine's slow first steps. The deadline is checked in parts, and a pause
        of this process counts as one missed part, so that a stopped process does not fail its own
        step.
        """
        assert self._watchdog is None
        watch = partial(self._watch, step_deadline_s)
        self._watchdog = asyncio.create_task(keep_going(watch, name="the engine's watchdog"))

    async def close(self) -> None:
        """Waits for the current step, then ends the thread. The caller closes the engine.

        Requests that still run or wait get an error. A thread that hangs is left running; closing
        the engine may still end it.
        """
        self._is_closed = True
        self._inbox.put(None)
        await asyncio.wait({self._ended, self._hung}, return_when=asyncio.FIRST_COMPLETED)
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._ended.done():
            await asyncio.to_thread(self._thread.join)
        self._tell_all(_closed())

    async def _watch(self, step_deadline_s: float) -> None:
        turn, num_looks = 0, 0
        while not self.failed.done():
            await asyncio.sleep(step_deadline_s / _LOOKS_IN)
            num_looks = num_looks + 1 if turn == self._num_turns and not self._is_idle else 0
            turn = self._num_turns
            if num_looks >= _LOOKS_IN:
                message = f"step {self.num_steps + 1} has not ended within {step_deadline_s:g} s"
                self._hung.set_result(None)
                self._deliver_failure(RankFailure(message))

    def _start(self) -> None:
        """Starts the engine's thread; the simulation in ``tests/sim`` overrides it."""
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._thread.start()

    # In the engine's thread.

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # For `top -H` and `bench.served`; Linux only.
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(ENGINE_THREAD)
        with self._failing():
            while self._take_inbox():
                self._num_turns += 1
                self._report(self._step())

    def _step(self) -> list[TokenDelta]:
        if not self._engine.has_work:
            return []
        outputs = self._engine.step()
        self.num_steps += 1
        return outputs

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns an exception in the block into the engine's failure."""
        try:
            yield
        except RankFailure as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the engine raised in step %d", self.num_steps)
            failure = RankFailure(f"the engine raised {type(error).__name__}; its log has more")
            self._fail(failure)
        finally:
            self._post(lambda: self._ended.set_result(None))

    def _take_inbox(self) -> bool:
        """Runs all waiting commands; waits for one if the engine has no work. False: the thread
        must end."""
        block = not self._engine.has_work
        while True:
            self._is_idle = block
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            finally:
                self._is_idle = False
            if command is None:
                return False
            command()
            block = False

    def _add(self, request: Prepared) -> None:
        self._num_added += 1
        try:
            self._engine.add_request(request)
        except (InvalidRequest, QueueFull) as error:
            self._refusals.append((request.request_id, error))

    def _report(self, outputs: list[TokenDelta]) -> None:
        log = self._engine.events
        events, self._events = tuple(self._events), []
        refusals, self._refusals = self._refusals, []
        result = StepResult(
            num_steps=self.num_steps,
            stats=self._engine.stats(),
            outputs=outputs,
            refusals=refusals,
            events=EventBatch(epoch=log.epoch, first_seq=log.next_seq - len(events), events=events),
            num_added=self._num_added,
        )
        self._post(lambda: self._deliver(result))

    def _fail(self, error: RankFailure) -> None:
        self._post(lambda: self._deliver_failure(error))

    def _post(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            _log.info("the event loop is closed; nobody hears the engine any more")

    # In the event loop.

    def _deliver(self, result: StepResult) -> None:
        if self.failed.done():
            return  # A step that had exceeded its deadline ended after all.
        self.stats = result.stats
        self.num_added = result.num_added
        for output in result.outputs:
            sink = self._sinks.get(output.request_id)
            if sink is None:
                continue  # Aborted while the step ran.
            if output.finish_reason is not None:
                del self._sinks[output.request_id]
            sink(output if output.error is None else output.error)
        for request_id, error in result.refusals:
            refused = self._sinks.pop(request_id, None)
            if refused is not None:
                refused(error)
        for on_step in tuple(self._listeners):
            on_step(result)

    def _deliver_failure(self, error: RankFailure) -> None:
        if not self.failed.done():
            _log.error("the group fails with %d requests: %s", len(self._sinks), error)
            self.failed.set_result(error)
        self._tell_all(error)

    def _tell_all(self, error: RankFailure) -> None:
        """Ends every request with ``error``."""
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(error)


def _closed() -> RankFailure:
    return RankFailure("the group's engine is closed")
