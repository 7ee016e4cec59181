"""The executor for ranks in other processes, which run each step in lockstep, on one node or more.

Each rank has a connection on which it receives steps; rank 0 sends outputs back. A launcher starts
and connects the ranks. On one node, the steps themselves are in shared memory.

Ranks hold no requests, so on the first failure all ranks are ended, and the group is lost as a
whole.
"""

import os
import select
import socket
import struct
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol, TypeVar

from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.model.config import read_model_spec, resolve_max_model_len
from quire.worker.model.hub import fetch_checkpoint
from quire.worker.rank.codec import StepSlots, all_slots_bytes, pack, slot_bytes, unpack
from quire.worker.rank.host_memory import host_bytes, host_offset, map_host_blocks
from quire.worker.rank.messages import Allocate, Failed, Loaded, RankStart, Ready, Store
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError, ConfigError, RankFailure
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments

COLLECTIVES_BYTES_PER_RANK = 4 << 20
"""Memory for each rank that the ranks of a node map for collectives; untouched pages are free."""

START_TIMEOUT_S = 1800.0
"""Timeout of loading, which takes minutes from slow storage. A rank's death is noticed at once."""

_SETTLE_S = 0.3
"""When one rank dies, the others soon fail in a collective: wait this long for the cause."""

_DEATH_S = 10.0
"""A rank that closes its connection without a message is ending: wait this long for its exit
status. On a busy machine, a process may be stopped between closing its sockets and exiting."""

_Message = TypeVar("_Message")


@dataclass(frozen=True, kw_only=True)
class Rank(ABC):
    """A connected rank, from the executor's side."""

    number: int
    pid: int
    host: str | None = None
    """Address of the rank's node; ``None`` for this node."""
    connection: Connection

    def describe(self) -> str:
        """A name for messages, such as "rank 1 (pid 4711)"."""
        where = f" on {self.host}" if self.host is not None else ""
        return f"rank {self.number} (pid {self.pid}{where})"

    @abstractmethod
    def state(self) -> str:
        """The rank's current state, such as "stopped"."""

    @abstractmethod
    def how_it_died(self) -> str | None:
        """How the rank ended, such as "died with signal 9"; ``None`` while it runs, and if that
        cannot be known."""


class Launcher(Protocol):
    """Starts the ranks of one group, and ends them."""

    num_nodes: int

    @property
    def shared_fd(self) -> int | None:
        """File descriptor of the memory that this process and all ranks share, if all are on this
        node."""

    def start(self, config: EngineConfig, *, shared_bytes: int) -> tuple[Sequence[Rank], Store]:
        """Starts all ranks with ``shared_bytes`` of zeroed shared memory, which may grow later.
        When all are connected, returns them by rank, and the `Store` where they meet."""

    def stop(self) -> None:
        """Ends the ranks and closes their connections. Called once."""


class LockstepExecutor:
    """Sends each step to all ranks and receives rank 0's output. Used from one thread, except
    `close`."""

    num_ahead: int
    numerics: str
    kv_format: KvFormat
    host_blocks_XC: Bytes | None

    def __init__(self, config: EngineConfig, launcher: Launcher) -> None:
        """
        Raises:
            ConfigError, CheckpointError: A rank raised it.
            RankFailure: A rank died or raised while starting. No rank is left.
        """
        self._step_timeout_s = config.step_timeout_s
        self._failure: str | None = None
        self._ranks: Sequence[Rank] = ()
        self._stop = weakref.finalize(self, launcher.stop)
        self._num_submitted = 0
        self._num_answered = 0
        self._oldest_began_s = 0.0
        """When the ranks could begin the oldest step under way."""
        try:
            self._start(config, launcher)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids, each as seen on its own node."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def submit(self, step: StepInput) -> None:
        self._check_open()
        try:
            message = pack(self._slots.write_step(self._num_submitted, step))
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
            # Rank 0 sends the tokens. Other ranks only send failures.
            while True:
                for rank in self._wait(self._ranks, deadline, self._step_timeout_s):
                    message = self._receive(rank)
                    if rank is self._ranks[0]:
                        output = self._slots.read_output(self._num_answered, message)
                        self._num_answered += 1
                        self._oldest_began_s = time.monotonic()
                        return output
        except BaseException:  # after a KeyboardInterrupt too: the output has not been received
            self.close()
            raise

    def close(self) -> None:
        self._stop()

    def _start(self, config: EngineConfig, launcher: Launcher) -> None:
        if config.enable_lora and launcher.num_nodes > 1:
            raise ConfigError(
                f"enable_lora=True: the ranks of a group are on {launcher.num_nodes} nodes, and an "
                "adapter is kept on one; give each group ranks of one node, or leave it out"
            )
        if config.host_kv_bytes and launcher.num_nodes > 1:
            raise ConfigError(
                f"{_host_settings(config)}: the ranks of a group are on {launcher.num_nodes} "
                "nodes, and blocks leave the KV cache through memory of one; give each group ranks "
                "of one node, or leave it out"
            )
        model = read_model_spec(fetch_checkpoint(config.model), model_impl=config.model_impl)
        size = slot_bytes(config, max_model_len=resolve_max_model_len(config, model))
        offset = COLLECTIVES_BYTES_PER_RANK * config.tensor_parallel_size
        shared_bytes = offset + all_slots_bytes(size)
        self._ranks, store = launcher.start(config, shared_bytes=shared_bytes)
        self._slots = StepSlots(size, shared_fd=launcher.shared_fd, offset=offset)
        self._poll = select.poll()
        for rank in self._ranks:
            self._poll.register(rank.connection.fileno(), select.POLLIN)
            # A hung rank's full socket must not block the executor.
            bound_waits(rank.connection, config.step_timeout_s)
        for rank in self._ranks:
            start = RankStart(
                rank=rank.number,
                config=config,
                num_on_node=config.tensor_parallel_size // launcher.num_nodes,
                store=store,
                slots_offset=offset,
                slot_bytes=size,
            )
            self._send(rank, pack(start))
        loaded = self._receive_all(Loaded)
        self._num_blocks = min(message.num_blocks for message in loaded)
        self.num_ahead = config.num_ahead(is_gpu=loaded[0].is_gpu)
        self.kv_format = loaded[0].kv_format
        allocate = self._make_host_blocks(loaded[0], launcher, offset=host_offset(shared_bytes))
        # A single value, unless ranks are on nodes of different kinds.
        self.numerics = " and ".join(sorted({message.numerics for message in loaded}))
        for rank in self._ranks:
            self._send(rank, pack(allocate))
        self._receive_all(Ready)

    def _make_host_blocks(self, loaded: Loaded, launcher: Launcher, *, offset: int) -> Allocate:
        fd, num_slots = launcher.shared_fd, loaded.num_host_blocks
        self.host_blocks_XC = None
        if num_slots:
            assert fd is not None, "several nodes were refused"
            os.ftruncate(fd, offset + host_bytes(loaded.kv_format, num_slots=num_slots))
            # Mapped here first, so that the pages are touched before the ranks map them.
            self.host_blocks_XC = map_host_blocks(
                loaded.kv_format, num_slots=num_slots, fd=fd, offset=offset
            )
        return Allocate(num_blocks=self._num_blocks, num_host_blocks=num_slots, host_offset=offset)

    def _check_open(self) -> None:
        if self._failure is not None or not self._stop.alive:
            raise RankFailure(self._failure or "the executor is closed")

    def _receive_all(self, kind: type[_Message]) -> list[_Message]:
        """One message from each rank, whatever the order of arrival."""
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

    def _send(self, rank: Rank, message: bytes) -> None:
        try:
            rank.connection.send_bytes(message)
        except BlockingIOError:
            self._time_out([rank], self._step_timeout_s)
        except OSError:
            self._fail()

    def _wait(self, silent: Sequence[Rank], deadline: float, timeout_s: float) -> list[Rank]:
        """Waits until at least one rank can be read, and returns those. ``silent`` are the ranks
        whose message is awaited."""
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
        """Finds the rank that most likely failed first, and raises for it.

        A rank that was killed sends nothing, and ranks that wait for it in a collective then
        raise. So a death is the cause before any message, and else the first message is.
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


def _host_settings(config: EngineConfig) -> str:
    """The settings that need host memory, for messages, such as "kv_transfer=True"."""
    values = {
        name: getattr(config, name) for name in ("kv_offloading_size", "kv_disk_dir", "kv_transfer")
    }
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if value)


def bound_waits(connection: Connection, timeout_s: float) -> None:
    """Sets a timeout: a longer operation on the connection raises `BlockingIOError`; 0 means no
    timeout."""
    seconds, fraction = divmod(timeout_s, 1)
    value = struct.pack("ll", int(seconds), int(fraction * 1e6))
    with socket.socket(fileno=socket.dup(connection.fileno())) as raw:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            raw.setsockopt(socket.SOL_SOCKET, option, value)
