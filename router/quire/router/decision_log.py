"""Keeps the last routing decisions, for explanations: the reason for each, and its result.

A decision is kept without copying it, so recording is almost free; reading copies. The numbers of
decisions and of candidates are both bounded, and the oldest decisions are dropped first.

A request that was rerouted to another group has one decision for each *attempt*.
"""

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

from quire.router.policies.policy import Decision
from quire.worker.request.outputs import Fetched

MAX_OUTCOME_CHARS = 200


@dataclass(slots=True, kw_only=True)
class Explanation:
    """One decision, and its result as far as it is known."""

    request_id: str
    """The completion's id. A client's request with several completions has several ids."""
    client_id: str
    """The id that the client gave the request, or empty."""
    tenant: str
    """The tenant that sent the request; empty if tenants are not distinguished."""
    attempt: int
    """Number of the attempt, from 1."""
    decided_at_s: float
    """Unix time of the decision."""
    policy: str
    pressure: float | None
    """See `quire.router.policies.policy.Policy`."""
    decision: Decision
    num_cached_tokens: int | None = None
    """Prompt tokens that the group found in its cache or fetched; None until the first token."""
    waited_s: float | None = None
    """Seconds from the decision to the first token; None until the first token."""
    fetched: Fetched | None = None
    """The group's fetch and its result; None until the first token, or if it fetched nothing."""
    outcome: str = ""
    """How the attempt ended; empty while it runs, or while the request waits to be rerouted."""


class DecisionLog:
    """A bounded log of decisions. Not thread-safe. Returned entries are copies."""

    def __init__(self, *, max_decisions: int, max_candidates: int) -> None:
        self.max_decisions = max_decisions
        self._max_candidates = max_candidates
        self._entries: deque[Explanation] = deque()
        self._latest: dict[str, Explanation] = {}  # The last attempt of each request, by id.
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
        """Records a decision. ``moved_because``: why the previous attempt ended, if any did."""
        if not self.max_decisions:
            return
        former = self._latest.get(request_id)
        # Recorded only now: a request that finds no other group has not moved.
        if former is not None:
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
        """Sets the outcome of the request's last attempt, unless it has one."""
        entry = self._latest.get(request_id)
        if entry is not None and not entry.outcome:
            entry.outcome = outcome[:MAX_OUTCOME_CHARS]

    def find(self, name: str, *, tenant: str | None = None) -> list[Explanation]:
        """Every logged attempt of the completion ``name``, or of all completions of the request to
        which Quire or its client gave that id, oldest first. Only the requests of ``tenant``, if it
        is given. Scans the whole log."""
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
        """The last ``limit`` attempts, newest first; of ``tenant`` only, if it is given."""
        newest = (entry for entry in reversed(self._entries) if tenant in (None, entry.tenant))
        return [replace(entry) for entry in islice(newest, limit)]

    def _drop_oldest(self) -> None:
        oldest = self._entries.popleft()
        self._num_candidates -= len(oldest.decision.groups)
        if self._latest[oldest.request_id] is oldest:
            del self._latest[oldest.request_id]
