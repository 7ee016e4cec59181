"""What hangs on the engine: constrained outputs, adapters, drafts, slower tiers of blocks, audits.

The engine knows none of them. It has a list of `Part`, calls their methods at fixed points of a
request's life and of a step, and does what they return. A part does not call the engine, except
through `Host`. All methods are called from the engine's thread.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NewType, Protocol

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.engine.choices import PLAIN, Choices
from quire.worker.engine.schedule import Schedule
from quire.worker.engine.sequence import Sequence
from quire.worker.request.errors import QuireError
from quire.worker.request.outputs import Fetched
from quire.worker.request.request import Prepared

Slot = NewType("Slot", int)
"""A block's place in a slower tier."""


class Part:
    """The methods in the order in which they are called. By default none does anything."""

    # A request comes.

    def check(self, request: Prepared) -> None:
        """Checks a request that is not added, by doing the work. Raises InvalidRequest."""

    def claim(self, seq: Sequence) -> None:
        """Keeps what ``seq`` needs until `forget`, or raises QueueFull."""

    def admit(self, seq: Sequence) -> bool:
        """Whether ``seq`` is ready to be queued. If not, `let_in` returns it later."""
        return True

    @property
    def is_preparing(self) -> bool:
        """Whether `let_in` would do anything."""
        return False

    def let_in(
        self, *, may_wait: bool, num_pending_tokens: int
    ) -> Iterable[tuple[Sequence, QuireError | None]]:
        """The sequences that this part has got ready, and those that it refuses, with the error.

        ``may_wait``: nothing else is to be done, so it may wait briefly. ``num_pending_tokens``:
        tokens that queued and running prompts have yet to compute.
        """
        return ()

    def queued(self, seq: Sequence) -> None:
        """``seq`` is about to be queued."""

    # A step is chosen.

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although there are no requests."""
        return False

    def begin(self, *, is_decoding: bool, step_s: float) -> None:
        """A step begins. ``step_s``: approximate duration of a step."""

    def own_sequence(self) -> Sequence | None:
        """Called while there are no requests: a sequence to run for this part alone. It has this
        part as `Sequence.owner`."""
        return None

    def await_choices(
        self, running: Items[Sequence], *, is_idle: bool = False
    ) -> Iterable[tuple[Sequence, QuireError]]:
        """Waits for `Choices.is_pending` of sequences, as long as a step may. Returns those that
        cannot go on. ``running`` are those of the step that runs meanwhile; ``is_idle``: none does.
        """
        return ()

    @property
    def wants_short_steps(self) -> bool:
        return False

    def next_step(self) -> tuple[Items[Sequence], Items[Sequence]]:
        """A step is chosen. Returns the queued and running sequences that wait for this part no
        longer, and those that wait now. It has updated their `Sequence.waits`."""
        return (), ()

    @property
    def needs_step(self) -> bool:
        """Whether a step must be submitted even if it computes no token."""
        return False

    def chosen(self, schedule: Schedule) -> Mapping[str, Any]:
        """Fields of the `StepInput` of ``schedule``, which will be submitted."""
        return {}

    # A step has run.

    def ran(self) -> None:
        """The oldest step under way has run. Its tokens are not in the sequences yet."""

    def owned_ran(self, seq: Sequence) -> None:
        """The step had a sample of ``seq``, which this part owns. ``seq`` ends now."""

    def sampled(self, schedule: Schedule) -> None:
        """The tokens of ``schedule`` are in the sequences, and those that they end are removed."""

    def began(self, seq: Sequence, fetched: Fetched) -> None:
        """``seq`` has its first output; ``fetched`` says which of its tokens were cached, and
        where."""

    def timed(self, num_prefilled: int, seconds: float) -> None:
        """A step with ``num_prefilled`` tokens of prompts took ``seconds``."""

    def wait(self) -> None:
        """The engine has nothing to do. May wait briefly."""

    # A request, or the engine, ends.

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended, wherever it was."""

    def reset(self) -> None:
        """Forgets what is known of other requests' tokens."""

    def stats(self) -> Mapping[str, Any]:
        """Fields of `EngineStats`."""
        return {}

    def save(self) -> None:
        """The engine will be closed, and can still run steps that copy blocks."""

    def close(self) -> None:
        """Ends threads. Can be called again."""


class Tier(Protocol):
    """Blocks in memory slower than the KV cache, for `BlockTables`."""

    def match(self, hashes: Items[BlockHash]) -> list[Slot]:
        """The slots of the longest prefix of ``hashes`` that is kept there."""

    def may_use(self, slots: Items[Slot]) -> bool:
        """Whether `load` may be called now; if not, ask again in the next step."""

    def load(
        self, seq: Sequence, slots: list[Slot], hashes: Items[BlockHash], parent: BlockId | None
    ) -> list[BlockId]:
        """Has the next step copy blocks into the KV cache for ``seq``, and registers them there
        behind ``parent``. Returns them, held; they may be fewer than ``slots``."""

    def yield_room(self) -> bool:
        """Releases blocks of the KV cache that no sequence holds; whether there were any."""


class Drafting(Protocol):
    """Proposes tokens that a sequence may sample next, for the scheduler."""

    def num_each(self, num_ready: int) -> int:
        """How many tokens to draft for each of ``num_ready`` decoding sequences."""

    def draft(self, seq: Sequence, max_tokens: int) -> list[int]:
        """At most ``max_tokens`` tokens; none of them may be the request's last."""

    def learn(self, seq: Sequence, *, num_drafted: int, num_accepted: int) -> None:
        """How many of the tokens drafted for ``seq`` were the sampled ones."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What an engine lends its parts."""

    pool: BlockPool
    log: EventLog
    clock: Callable[[], float]
    is_idle: Callable[[], bool]
    """Whether no request is queued or runs."""
    run_copies: Callable[[], None]
    """Finishes the steps under way, then runs one that computes no token."""
    stop_naming: Callable[[frozenset[BlockHash]], None]
    """Stops sharing blocks of sequences that use one of these blocks."""


ChoicesOf = Callable[[Prepared, frozenset[int]], Choices]
"""The choices of a request, given the tokens that end it."""


def plain_choices(request: Prepared, end_ids: frozenset[int]) -> Choices:
    return PLAIN


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an engine, in the order in which they prepare a request."""

    every: Items[Part] = ()
    tier: Tier | None = None
    drafting: Drafting | None = None
    choices_of: ChoicesOf = plain_choices


NO_PARTS = Parts()
