"""Requests whose adapter a thread reads while other requests run.

An adapter that was read has been checked completely, is in memory as far as the system has room,
and stays in the node's store. This holds as long as requests name the adapter, and for the
``max_kept`` most recently used adapters.
"""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from quire.worker.engine.sequence import Sequence
from quire.worker.model.config import read_model_spec, resolve_dtype
from quire.worker.model.hub import fetch_text_files
from quire.worker.parts.adapters.peft import check_adapter
from quire.worker.parts.adapters.store import AdapterStore, Held
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import AdapterError, InvalidRequest, QueueFull

_log = logging.getLogger(__name__)

MAX_AT_HAND = 512
"""Most adapters that current requests may name together: each takes a file descriptor."""
_WAIT_S = 0.005
"""How long an idle engine waits here before it looks for new requests."""

Read = Callable[[str], Held]
"""Holds and checks the adapter with a digest, or raises InvalidRequest."""


class Reading:
    """Used from the engine's thread. Starts its own thread with the first adapter."""

    def __init__(self, read: Read, *, max_kept: int) -> None:
        self._read = read
        self._max_kept = max_kept
        self._thread: ThreadPoolExecutor | None = None
        # Adapters that were read, the least recently used first.
        self._kept: dict[str, Held] = {}
        self._num_users = Counter[str]()
        self._reads: dict[str, Future[Held]] = {}
        self._sequences: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def kept(self) -> tuple[str, ...]:
        """The digests of the adapters that are ready, the most recently used one last."""
        return tuple(self._kept)

    def check(self, digest: str) -> None:
        """Reads an adapter, and waits for it.

        Raises:
            InvalidRequest: The adapter does not exist, or cannot be served with this model.
        """
        if digest not in self._kept:
            self._kept[digest] = self._read_or_refuse(digest)
            self._let_go()

    def claim(self, seq: Sequence) -> None:
        """Keeps the adapter of ``seq`` until `forget`, which must follow.

        Raises:
            QueueFull: Requests name too many adapters.
        """
        digest = seq.request.adapter
        if digest not in self._num_users and len(self._num_users) >= MAX_AT_HAND:
            raise QueueFull(
                f"requests at hand name {len(self._num_users)} adapters, {MAX_AT_HAND} are "
                "allowed: try again later"
            )
        self._num_users[digest] += 1

    def add(self, seq: Sequence) -> bool:
        """Returns whether the adapter of ``seq`` is ready. If not, starts to read it; `take`
        returns ``seq`` once it is ready."""
        digest = seq.request.adapter
        held = self._kept.pop(digest, None)
        if held is not None:
            self._kept[digest] = held
            return True
        if digest not in self._reads:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "quire-adapters")
            self._reads[digest] = self._thread.submit(self._read_or_refuse, digest)
        self._sequences[seq] = None
        return False

    def take(self, *, may_wait: bool) -> list[tuple[Sequence, InvalidRequest | None]]:
        """Returns the sequences whose adapters are ready, and those that are refused with their
        error. ``may_wait``: the engine is idle, so this may wait briefly."""
        if may_wait:
            wait(self._reads.values(), _WAIT_S, FIRST_COMPLETED)
        errors: dict[str, InvalidRequest | None] = {}
        for digest in [digest for digest, read in self._reads.items() if read.done()]:
            read = self._reads.pop(digest)
            error = read.exception()
            assert error is None or isinstance(error, InvalidRequest)
            errors[digest] = error
            if error is None:
                self._kept[digest] = read.result()
        taken = [
            (seq, errors[seq.request.adapter])
            for seq in self._sequences
            if seq.request.adapter in errors
        ]
        for seq, _ in taken:
            del self._sequences[seq]
        self._let_go()
        return taken

    def forget(self, seq: Sequence) -> None:
        """Drops the claim of ``seq``, which has ended."""
        self._sequences.pop(seq, None)
        digest = seq.request.adapter
        self._num_users[digest] -= 1
        if not self._num_users[digest]:
            del self._num_users[digest]
            self._let_go()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()

    def _let_go(self) -> None:
        """Releases adapters above ``max_kept`` that no request names, least recently used first."""
        for digest in list(self._kept):
            if len(self._kept) <= self._max_kept:
                break
            if digest not in self._num_users:
                self._kept.pop(digest).release()

    def _read_or_refuse(self, digest: str) -> Held:
        try:
            return self._read(digest)
        except InvalidRequest:
            raise
        except Exception as error:  # An unexpected error fails only this adapter's requests.
            _log.error("an adapter could not be read", exc_info=error)
            raise InvalidRequest(
                f"adapter={digest!r} could not be read: {error!r}", param="adapter"
            ) from error


def checker(config: EngineConfig) -> Callable[[Path], None]:
    """Returns a function that checks whether ``config.model`` can run the adapter in a folder. It
    raises AdapterError."""

    def check(folder: Path) -> None:
        spec = read_model_spec(fetch_text_files(config.model), model_impl=config.model_impl)
        dtype = resolve_dtype(config, spec)
        check_adapter(folder, spec, max_rank=config.max_lora_rank, dtype=dtype)

    return check


def reader(config: EngineConfig) -> Read:
    """Returns a function that reads adapters of ``config.model`` from this node's store."""
    store, check = AdapterStore(), checker(config)

    def read(digest: str) -> Held:
        held = store.hold(digest)
        if held is None:
            raise InvalidRequest(
                f"adapter={digest!r}: {store.root} has no adapter of this digest; load it first",
                param="adapter",
            )
        try:
            check(held.folder)
        except AdapterError as error:
            held.release()
            raise InvalidRequest(f"adapter: {error}", param="adapter") from error
        return held

    return read
