"""Refuses constraints that no group would serve, before anything is sent to one."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import inf

from quire.cluster.errors import Overloaded
from quire.cluster.serving.deadline import late
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.structured import Constraint
from quire.worker.text.grammar import Grammars
from quire.worker.text.tokenizer import Tokenizer


class Constraints:
    """Belongs to one event loop. New constraints are compiled in threads, known ones at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_waiting: int,
        refused: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_waiting``: constraints that are being compiled, or wait to be; ``refused`` is
        called before one more is refused."""
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._refused = refused
        self._clock = clock
        self._num_waiting = 0
        self._grammars: Grammars | None = None
        # One thread: whoever sends hostile ones delays others like them, and takes one core.
        self._thread: ThreadPoolExecutor | None = None

    async def check(
        self, constraint: Constraint, *, vocab_size: int, deadline_s: float = inf
    ) -> None:
        """Raises:
        InvalidRequest: It means nothing, is not supported or takes too much work.
        Overloaded: Too many wait already.
        DeadlineExceeded: ``deadline_s`` passed before its turn came.
        """
        if self._grammars is None or self._thread is None:
            # Where an output may end is no matter here.
            self._grammars = Grammars(
                lambda: self._tokenizer, vocab_size=vocab_size, eos_token_ids=[0]
            )
            self._thread = ThreadPoolExecutor(1, "quire-grammar")
        found = self._grammars.kept(constraint)
        if isinstance(found, InvalidRequest):
            raise found
        if found is not None:
            return
        if self._num_waiting >= self._max_waiting:
            self._refused()
            raise Overloaded(
                f"{self._num_waiting} grammars are being compiled, at most {self._max_waiting} may "
                "be: try again later",
                reason="inflight",
                retry_after_s=1.0,
            )
        compiling = asyncio.get_running_loop().run_in_executor(
            self._thread, self._grammars.compile, constraint
        )
        self._num_waiting += 1
        compiling.add_done_callback(self._done)
        try:
            async with asyncio.timeout(None if deadline_s == inf else deadline_s - self._clock()):
                await compiling
        except TimeoutError:
            raise late() from None

    def _done(self, compiling: "asyncio.Future[object]") -> None:
        self._num_waiting -= 1
        if not compiling.cancelled():
            compiling.exception()  # Whoever would have been told may be gone.
