"""Ranks in other processes that work in lockstep, whatever started them and carries their steps.

Ranks hold no requests, so on the first sign of trouble all are ended, and the group is lost as
a whole.
"""

import select
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol, TypeVar

from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import CheckpointError, ConfigError, RankFailure
from quire.worker.ranks.messages import Failed, Loaded, Ready
from quire.worker.step.codec import pack, unpack
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments

START_TIMEOUT_S = 1800.0
"""Loading from slow storage takes minutes; a rank that dies meanwhile is noticed at once."""

_SETTLE_S = 0.3
"""When one rank dies the others soon fail too, in a collective: wait this long for the cause."""

_DEATH_S = 10.0
"""A rank that hangs up without a word is ending: wait this long until the kernel says how. On a
busy machine a process may be stopped between closing its sockets and being dead."""

_Message = TypeVar("_Message")


class Rank(Protocol):
    """A rank, as its executor sees it."""

    @property
    def number(self) -> int: ...

    @property
    def connection(self) -> Connection:
        """A message that it does not accept within the step's deadline raises `BlockingIOError`: a
        hung rank's full socket must not hang its executor too."""

    def describe(self) -> str:
        """Such as "rank 1 (pid 4711)"."""

    def state(self) -> str:
        """Its present state, such as "stopped"."""

    def how_it_died(self) -> str | None:
        """ "died with signal 9"; ``None`` while it runs, and where nobody can know."""


class LockstepExecutor(ABC):
    """Gives each step to all ranks and takes rank 0's answer. Used from one thread; `close` from
    any. Subclasses start the ranks, and say how steps and outputs travel."""

    num_ahead: int
    numerics: str

    def __init__(self, config: EngineConfig, *, stop: Callable[[], None]) -> None:
        """``stop`` ends the ranks and closes their connections. It is called once."""
        self._step_timeout_s = config.step_timeout_s
        self._failure: str | None = None
        self._ranks: Sequence[Rank] = ()
        self._stop = weakref.finalize(self, stop)
        self._num_submitted = 0
        self._num_answered = 0
        self._oldest_began_s = 0.0
        """When the ranks could begin with the oldest step that is under way."""

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def submit(self, step: StepInput) -> None:
        self._check_open()
        try:
            message = self._write_step(step, self._num_submitted)
            if self._num_submitted == self._num_answered:
                self._oldest_began_s = time.monotonic()
            for rank in self._ranks:
                self._send(rank, message)
            self._num_submitted += 1
        except BaseException:  # after a KeyboardInterrupt too: some ranks may have the step
            self.close()
            raise

    def send_edits(self, adjustments: Adjustments | None) -> None:
        self._check_open()
        try:
            self._send(self._ranks[0], pack(adjustments))
        except BaseException:  # as in `submit`
            self.close()
            raise

    def result(self) -> StepOutput:
        self._check_open()
        deadline = self._oldest_began_s + self._step_timeout_s
        try:
            # The others only speak to say that they failed; rank 0 has the tokens.
            while True:
                for rank in self._wait(self._ranks, deadline, self._step_timeout_s):
                    message = self._receive(rank)
                    if rank is self._ranks[0]:
                        output = self._read_output(message, self._num_answered)
                        self._num_answered += 1
                        self._oldest_began_s = time.monotonic()
                        return output
        except BaseException:  # after a KeyboardInterrupt too: the answer is still on its way
            self.close()
            raise

    def close(self) -> None:
        self._stop()

    @abstractmethod
    def _write_step(self, step: StepInput, number: int) -> bytes | memoryview:
        """The message for the step of this number, the same one for every rank."""

    @abstractmethod
    def _read_output(self, message: Any, number: int) -> StepOutput:
        """The output in rank 0's message for that step."""

    def _start_ranks(
        self, config: EngineConfig, ranks: Sequence[Rank], starts: Sequence[object]
    ) -> None:
        """Brings connected ranks to where they take steps; ``starts`` has each one's first
        message."""
        self._ranks = ranks
        self._poll = select.poll()
        for rank in ranks:
            self._poll.register(rank.connection.fileno(), select.POLLIN)
        for rank, start in zip(ranks, starts, strict=True):
            self._send(rank, pack(start))
        loaded = self._receive_all(Loaded)
        self._num_blocks = min(message.num_blocks for message in loaded)
        self.num_ahead = config.num_ahead(is_gpu=loaded[0].is_gpu)
        # One, but where ranks are on nodes of different kinds.
        self.numerics = " and ".join(sorted({message.numerics for message in loaded}))
        for rank in ranks:
            self._send(rank, pack(self._num_blocks))
        self._receive_all(Ready)

    def _check_open(self) -> None:
        if self._failure is not None or not self._stop.alive:
            raise RankFailure(self._failure or "the executor is closed")

    def _receive_all(self, kind: type[_Message]) -> list[_Message]:
        """One message of each rank, in whatever order they come."""
        deadline = time.monotonic() + START_TIMEOUT_S
        missing = list(self._ranks)
        messages: list[_Message] = []
        while missing:
            for rank in self._wait(missing, deadline, START_TIMEOUT_S):
                message = self._receive(rank)
                if not isinstance(message, kind):
                    raise RankFailure(f"rank {rank.number} sent {message!r} at its start")
                messages.append(message)
                missing.remove(rank)
        return messages

    def _send(self, rank: Rank, message: bytes | memoryview) -> None:
        try:
            rank.connection.send_bytes(message)
        except BlockingIOError:
            self._time_out([rank], self._step_timeout_s)
        except OSError:
            self._fail()

    def _wait(self, silent: Sequence[Rank], deadline: float, timeout_s: float) -> list[Rank]:
        """The ranks that have something to say, at least one, of which ``silent`` ones should."""
        remaining_s = max(0.0, deadline - time.monotonic())
        ready = {fd for fd, _ in self._poll.poll(remaining_s * 1e3)}
        if not ready:
            self._time_out(silent, timeout_s)
        try:
            return [rank for rank in self._ranks if rank.connection.fileno() in ready]
        except OSError:  # another thread has closed the connections
            self._fail()

    def _receive(self, rank: Rank) -> Any:
        try:
            message = unpack(rank.connection.recv_bytes())
        except (EOFError, OSError):
            self._fail()
        if isinstance(message, Failed):
            self._fail((rank, message))
        return message

    def _time_out(self, ranks: Sequence[Rank], timeout_s: float) -> NoReturn:
        silent = " and ".join(rank.describe() for rank in ranks)
        states = ", ".join(f"rank {rank.number} {rank.state()}" for rank in self._ranks)
        self._lose(f"{silent} did not answer within {timeout_s:g} s; now: {states}")

    def _fail(self, first: tuple[Rank, Failed] | None = None) -> NoReturn:
        """Finds the rank that failed first, in all likelihood, and raises for it.

        A rank that was killed says nothing, and those that waited for it in a collective then
        raise: so a death comes before all that was said, and what was said first before the rest.
        """
        said = [first] if first is not None else []
        begin_s = time.monotonic()
        while self._stop.alive:
            for rank in self._ranks:
                death = rank.how_it_died()
                if death is not None:
                    self._lose(f"{rank.describe()} {death}")
            if not said:
                said = self._drain_failures()
            if time.monotonic() - begin_s > (_SETTLE_S if said else _DEATH_S):
                break
            time.sleep(0.005)
        if not said:
            self._lose("a rank hung up" if self._stop.alive else "the executor is closed")
        rank, failed = said[0]
        for kind in (ConfigError, CheckpointError):
            if failed.kind == kind.__name__:
                self.close()
                raise kind(failed.message)
        self._lose(
            f"{rank.describe()} raised {failed.kind}: {failed.message}", note=failed.traceback
        )

    def _drain_failures(self) -> list[tuple[Rank, Failed]]:
        said = []
        for rank in self._ranks:
            try:
                while rank.connection.poll():
                    message = unpack(rank.connection.recv_bytes())
                    if isinstance(message, Failed):
                        said.append((rank, message))
            except (EOFError, OSError):
                continue
        return said

    def _lose(self, message: str, *, note: str | None = None) -> NoReturn:
        self._failure = message
        self.close()
        error = RankFailure(message)
        if note is not None:
            error.add_note(note)
        raise error
