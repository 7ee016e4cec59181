"""The last routing decisions: the reason for each, and its result.

A decision is kept as it was taken, without copying, so that recording costs next to nothing; the
reader pays. Numbers of decisions and of candidates are both bounded: the oldest decisions go.

A request that was sent on to another group has one decision for each *attempt*.
"""

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

from quire.router.policies.policy import Decision
from quire.worker.api.outputs import Fetched

MAX_OUTCOME_CHARS = 200


@dataclass(slots=True, kw_only=True)
class Explanation:
    """One decision, and its result as far as it is known."""

    request_id: str
    """The completion's id: a client's request has one for each of its completions."""
    client_id: str
    """The client's name for the request, if it has one."""
    tenant: str
    """Whose request it is; empty where tenants are not told apart."""
    attempt: int
    """Counted from 1."""
    decided_at_s: float
    """Since 1970."""
    policy: str
    pressure: float | None
    """See `quire.router.policies.policy.Policy`."""
    decision: Decision
    num_cached_tokens: int | None = None
    """Found by the group in its cache or fetched; None until its first token, as are the next."""
    waited_s: float | None = None
    """From the decision to the first token."""
    fetched: Fetched | None = None
    """What it fetched; also None where nothing was or was to be."""
    outcome: str = ""
    """How the attempt ended; empty while it goes on, or the request waits for another group."""


class DecisionLog:
    """Not safe for threads. What it hands out is the caller's own."""

    def __init__(self, *, max_decisions: int, max_candidates: int) -> None:
        self.max_decisions = max_decisions
        self._max_candidates = max_candidates
        self._entries: deque[Explanation] = deque()
        self._latest: dict[str, Explanation] = {}  # By request: its last attempt.
        self._num_candidates = 0

    @property
    def num_decisions(self) -> int:
        return len(self._entries)

    @property
    def num_candidates(self) -> int:
        return self._num_candidates

    def add(
        self,
        request_id: str,
        decision: Decision,
        *,
        client_id: str,
        decided_at_s: float,
        policy: str,
        pressure: float | None,
        tenant: str = "",
        moved_because: str = "",
    ) -> None:
        """``moved_because``: why the attempt before this one ended, where there was one."""
        if not self.max_decisions:
            return
        former = self._latest.get(request_id)
        if former is not None:  # Not before: a request that finds no other group has not moved.
            outcome = f"moved: {moved_because}" if moved_because else "moved"
            self.ended(request_id, outcome)
        entry = Explanation(
            request_id=request_id,
            client_id=client_id,
            tenant=tenant,
            attempt=former.attempt + 1 if former else 1,
            decided_at_s=decided_at_s,
            policy=policy,
            pressure=pressure,
            decision=decision,
        )
        self._entries.append(entry)
        self._latest[request_id] = entry
        self._num_candidates += len(decision.groups)
        while len(self._entries) > self.max_decisions or (
            self._num_candidates > self._max_candidates and len(self._entries) > 1
        ):
            self._drop_oldest()

    def started(
        self,
        request_id: str,
        *,
        num_cached_tokens: int,
        waited_s: float,
        fetched: Fetched | None = None,
    ) -> None:
        entry = self._latest.get(request_id)
        if entry is not None:
            entry.num_cached_tokens, entry.waited_s = num_cached_tokens, waited_s
            entry.fetched = fetched

    def ended(self, request_id: str, outcome: str) -> None:
        """The request's last attempt ended so, if that is not known yet."""
        entry = self._latest.get(request_id)
        if entry is not None and not entry.outcome:
            entry.outcome = outcome[:MAX_OUTCOME_CHARS]

    def find(self, name: str, *, tenant: str | None = None) -> list[Explanation]:
        """Every attempt that is kept, oldest first, of the completion ``name``, or of all
        completions of the request that Quire or its client calls so. Looks at all that is kept, as
        the next does for a ``tenant``, to whose requests both then keep."""
        return [
            replace(entry)
            for entry in self._entries
            if tenant in (None, entry.tenant)
            and (
                name in (entry.request_id, entry.client_id)
                or entry.request_id.rpartition("-")[0] == name
            )
        ]

    def recent(self, limit: int, *, tenant: str | None = None) -> list[Explanation]:
        """The last ones, newest first."""
        newest = (entry for entry in reversed(self._entries) if tenant in (None, entry.tenant))
        return [replace(entry) for entry in islice(newest, limit)]

    def _drop_oldest(self) -> None:
        oldest = self._entries.popleft()
        self._num_candidates -= len(oldest.decision.groups)
        if self._latest[oldest.request_id] is oldest:
            del self._latest[oldest.request_id]
