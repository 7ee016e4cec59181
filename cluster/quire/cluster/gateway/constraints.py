"""Refuses constraints that no group would serve, before a request is sent to one."""

import asyncio
import threading
import time
from collections.abc import Callable
from math import inf

from quire.cluster.gateway.deadline import late
from quire.cluster.gateway.work import Run, Take, Work
from quire.cluster.serving.bounds import Hold, Inflight
from quire.worker.request.errors import ConstraintRefused, InvalidRequest
from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.compile_queue import CompileThreads
from quire.worker.text.grammar.kept import Kept
from quire.worker.text.grammar.process import GrammarProcess
from quire.worker.text.tokenizer import Tokenizer

_NUM_PROCESSES = 2
"""Two, so that a constraint that takes long does not block other tenants."""


class Constraints:
    """Checks constraints by compiling them. Belongs to one event loop.

    Constraints are compiled in separate processes, and tenants take turns. A result is remembered
    for the tenant that sent the constraint.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_waiting: int,
        refused: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_waiting``: most constraints that are compiled or wait to be. ``refused`` is called
        before one more is refused."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._waiting = Inflight(
            max_waiting,
            "{num} grammars are being compiled, at most {limit} may be: try again later",
            refused=refused,
        )
        self._known: Kept[str] = Kept()  # Why a constraint is refused; empty if it is not.
        self._threads = CompileThreads(_NUM_PROCESSES)
        self._of_thread = threading.local()

    async def check(
        self,
        constraint: Constraint,
        *,
        tenant: str = "",
        vocab_size: int,
        deadline_s: float = inf,
    ) -> None:
        """Returns if groups would serve the constraint to ``tenant``.

        Raises:
            InvalidRequest: The constraint is invalid, not supported or too much work to compile.
            Overloaded: Too many constraints wait already.
            DeadlineExceeded: ``deadline_s`` passed before the constraint's turn.
        """
        refusal = self._known.get(tenant, constraint)
        if refusal is None:
            place = self._waiting.entered(tenant=tenant)
            compiling = asyncio.wrap_future(
                self._threads.submit(
                    lambda: self._compile(constraint, tenant, vocab_size),
                    constraint,
                    tenant=tenant,
                )
            )
            compiling.add_done_callback(lambda done: _done(done, place))
            timeout_s = None if deadline_s == inf else deadline_s - self._clock()
            try:
                async with asyncio.timeout(timeout_s):
                    refusal = await compiling
            except TimeoutError:
                raise late() from None
        if refusal:
            raise InvalidRequest(refusal, param="structured_outputs")

    async def learn(self, work: Work, take: Take, run: Run[Work]) -> None:
        """A layer that remembers the constraints that groups refuse, and why."""
        try:
            await run(work, take)
        except ConstraintRefused as error:
            first = work.first
            if first.sampling.constraint is not None:
                self._known.put(first.tenant, first.sampling.constraint, str(error))
            raise

    def close(self) -> None:
        """Ends the threads, each with its process. Waiting constraints are not compiled."""
        self._threads.close()

    def _compile(self, constraint: Constraint, tenant: str, vocab_size: int) -> str:
        """Compiles the constraint. Runs in a thread."""
        refusal = self._known.get(tenant, constraint)
        if refusal is not None:
            return refusal  # Another request had the same constraint.
        process: GrammarProcess | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = GrammarProcess(self._tokenizer, vocab_size=vocab_size)
            self._of_thread.process = process
        try:
            process.check(constraint)
            refusal = ""
        except InvalidRequest as error:
            refusal = str(error)
        self._known.put(tenant, constraint, refusal)
        return refusal


def _done(compiling: "asyncio.Future[str]", place: Hold) -> None:
    place.release()
    if not compiling.cancelled():
        compiling.exception()  # Marks it as seen: the waiting request may be gone.
