"""Limits on the bytes and on the requests that a gateway has at a time, shared fairly by tenants.

A tenant may take as much as it leaves free: alone half of a limit, beside one other that does the
same a third. So however much one tenant takes and however long it keeps it, others find room at
once (dynamic thresholds: Choudhury and Hahne 1998). A tenant that holds nothing may take all that
is free, so that a limit may be a single place. Without API keys there is one tenant, "", which may
take everything.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from quire.cluster.errors import Overloaded


class Shares:
    """How much of ``limit`` each tenant holds; their sum ``held`` is at most ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._held_of: dict[str, int] = {}

    def is_within_share(self, amount: int, tenant: str) -> bool:
        """Whether ``tenant`` may take ``amount`` more, once that is free."""
        held = self._held_of.get(tenant, 0)
        return not (tenant and held) or held + amount <= self.limit - self.held - amount

    def take(self, amount: int, tenant: str) -> bool:
        """Takes ``amount``, if that is free and within the tenant's share."""
        if self.held + amount > self.limit or not self.is_within_share(amount, tenant):
            return False
        self.held += amount
        self._held_of[tenant] = self._held_of.get(tenant, 0) + amount
        return True

    def give_back(self, amount: int, tenant: str) -> None:
        self.held -= amount
        self._held_of[tenant] -= amount
        if not self._held_of[tenant]:
            del self._held_of[tenant]


class Hold:
    """Bytes or places that were taken. They are given back once, by `release` or at the end of
    ``with``."""

    def __init__(
        self,
        give_back: Callable[[int], object] = lambda amount: None,
        amount: int = 0,
        tenant: str = "",
    ) -> None:
        self.amount = amount
        self.tenant = tenant
        self._give_back = give_back

    def shrink(self, amount: int) -> None:
        """Gives back all but ``amount``."""
        if amount < self.amount:
            excess, self.amount = self.amount - amount, amount
            self._give_back(excess)

    def release(self) -> None:
        self.shrink(0)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Inflight:
    """Counts requests in progress; ``num`` is at most ``limit``. Nobody waits for a place."""

    def __init__(self, limit: int, message: str, *, refused: Callable[[], object]) -> None:
        """``message`` is that of a refusal, with fields for ``num``, ``more`` and ``limit``.
        ``refused`` is called before each refusal."""
        self._shares = Shares(limit)
        self._message = message
        self._refused = refused

    @property
    def num(self) -> int:
        return self._shares.held

    def missing(self, more: int) -> int:
        """How many requests would have to leave before ``more`` can enter."""
        return max(0, self.num + more - self._shares.limit)

    def entered(self, more: int = 1, *, tenant: str = "") -> Hold:
        """Counts ``more`` requests until the hold is released. ``tenant``: gives it its share only.
        Raises Overloaded: there would be too many."""
        if not self._shares.take(more, tenant):
            self._refused()
            message = self._message.format(num=self.num, more=more, limit=self._shares.limit)
            raise Overloaded(message, reason="inflight", retry_after_s=1.0)
        return Hold(lambda amount: self._shares.give_back(amount, tenant), more, tenant)


_CALLS_PER_TURN = 2
_Waiting = tuple[int, asyncio.Future[None]]


class Budget:
    """A budget for which requests wait: tenants take turns, and those of one tenant are served in
    order of arrival. Who may take its turn is overtaken by nobody, so that large requests do not
    starve.

    Belongs to one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting = 0
        """Sum of what is waited for."""
        self._shares = Shares(limit)
        self._queues: dict[str, deque[_Waiting]] = {}  # By tenant, the next turn first.

    @property
    def held(self) -> int:
        return self._shares.held

    async def take(self, amount: int, tenant: str = "") -> Hold:
        """Waits until ``amount`` is free for the tenant and takes it; more than ``limit`` takes
        all."""
        wanted = min(amount, self.limit)
        entry = self._enter(wanted, tenant)
        try:
            await entry[1]  # `_serve` has counted it as held.
        except asyncio.CancelledError:
            self._leave(entry, tenant)
            raise
        return self._hold(wanted, tenant)

    def take_now(self, amount: int, tenant: str = "") -> Hold | None:
        """Takes as `take` does; ``None`` if it would have to wait."""
        wanted = min(amount, self.limit)
        entry = self._enter(wanted, tenant)
        if not entry[1].done():
            self._leave(entry, tenant)
            return None
        return self._hold(wanted, tenant)

    def _hold(self, amount: int, tenant: str) -> Hold:
        return Hold(lambda excess: self._give_back(excess, tenant), amount, tenant)

    def _enter(self, wanted: int, tenant: str) -> _Waiting:
        entry = (wanted, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(entry)
        self.waiting += wanted
        self._serve()
        return entry

    def _leave(self, entry: _Waiting, tenant: str) -> None:
        """Removes one who waits no longer, or gives back what it was served meanwhile."""
        wanted, future = entry
        queue = self._queues.get(tenant)
        if future.done() and not future.cancelled():
            self._give_back(wanted, tenant)
        elif queue is not None and entry in queue:
            self._remove(entry, tenant, queue)
            self._serve()  # Others may fit now.

    def _remove(self, entry: _Waiting, tenant: str, queue: deque[_Waiting]) -> None:
        queue.remove(entry)
        self.waiting -= entry[0]
        if not queue:
            del self._queues[tenant]

    def _give_back(self, amount: int, tenant: str) -> None:
        self._shares.give_back(amount, tenant)
        self._serve()

    def _serve(self) -> None:
        while (tenant := self._next()) is not None:
            queue = self._queues.pop(tenant)
            self._queues[tenant] = queue  # Its next turn comes after the others'.
            wanted, future = entry = queue[0]
            if not future.cancelled() and not self._shares.take(wanted, tenant):
                self._queues = {tenant: queue, **self._queues}  # It keeps its turn.
                return
            self._remove(entry, tenant, queue)
            if not future.cancelled():
                future.set_result(None)

    def _next(self) -> str | None:
        """The next tenant within its share."""
        for tenant, queue in self._queues.items():
            wanted, future = queue[0]
            if future.cancelled() or self._shares.is_within_share(wanted, tenant):
                return tenant
        return None


class Turns:
    """Lets few calls begin in each turn of the event loop, tenants in turn. Belongs to that loop.

    To parse and check a call takes about a millisecond. The event loop runs all that is ready
    before it looks at its sockets again, so 1,500 calls at once would keep tokens, the groups'
    frames and other tenants' calls waiting for seconds.
    """

    def __init__(self) -> None:
        self._left = _CALLS_PER_TURN
        self._is_due = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # By tenant, next turn first.

    async def take(self, tenant: str) -> None:
        """Waits for a turn of the event loop in which a call of ``tenant`` may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_due:
            self._is_due = True
            loop.call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        future = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(future)
        await future

    def _turn(self) -> None:
        self._left = _CALLS_PER_TURN
        while self._left and self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            future = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # Its next turn comes after the others'.
            if not future.done():  # It was cancelled.
                future.set_result(None)
                self._left -= 1
        self._is_due = bool(self._waiting) or self._left < _CALLS_PER_TURN
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._turn)
