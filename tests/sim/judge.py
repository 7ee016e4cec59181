"""Judges whether a request may end as it did: only faults, load or deadlines excuse errors."""

import grpc
from tests.sim.asks import Ask, Wrong
from tests.sim.clients import Clients
from tests.sim.cluster import Cluster
from tests.sim.faults import Chaos

_AFTERMATH_S = 30.0
"""Longest time that effects of a fault last, recovery included."""
_START_S = 3.0
"""Time allowed for gateways to connect to the first groups."""
_SLACK_S = 0.5
"""Slack in seconds, far above the latency of a few messages."""
_IDLE_S = 2.0
"""Seconds of idleness after which every gateway knows that a group is idle."""


class Judge:
    """The judge of one run."""

    def __init__(self, cluster: Cluster, clients: Clients, chaos: Chaos) -> None:
        self._cluster, self._clients, self._chaos = cluster, clients, chaos

    def check(self, ask: Ask) -> None:
        """Raises Wrong if ``ask``, which has just ended, may not end as it did."""
        now_s = self._cluster.loop.time()
        if ask.error is not None:
            error = f"{ask.error.code().name}: {ask.error.details()}"
            if not self._excuses(ask, now_s):
                raise Wrong(f"{ask} failed at {now_s:.3f} s with {error}")
            if ask.is_refused and not self._was_prompt(ask, now_s):
                raise Wrong(f"{ask} was refused late, at {now_s:.3f} s, with {error}")
        if ask.deadline_s is not None and not ask.pauses_s and not self._num_faults(ask):
            late_s = now_s - ask.begin_s - ask.deadline_s
            if late_s > _SLACK_S:
                raise Wrong(f"{ask} ended {late_s:.3f} s after its deadline")

    def _excuses(self, ask: Ask, now_s: float) -> bool:
        assert ask.error is not None
        code, details = ask.error.code(), ask.error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return ask.deadline_s is not None and now_s >= ask.begin_s + ask.deadline_s
        plan = self._cluster.plan
        num_faults = self._num_faults(ask)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            if not ask.is_refused:  # The groups refused: full queues.
                return plan.max_num_waiting < 1000 or num_faults > 0
            return not ask.num_tokens and (num_faults > 0 or not self._is_any_idle(now_s))
        resume = plan.gateway.completion
        if code == grpc.StatusCode.ABORTED:  # Quarantined.
            # A single poison must not get another request convicted. With a second poison or
            # random faults, a third death may be blamed on the wrong request.
            is_ambiguous = bool(self._chaos.faults) or len(self._poisons(ask)) > 1
            is_possible = is_ambiguous and num_faults >= resume.max_group_deaths
            return ask.is_poison or is_possible
        if code != grpc.StatusCode.UNAVAILABLE:
            return False
        if "no replica group" not in details:  # The gateway was down.
            return any("gateway" in fault.kind for fault in self._chaos.faults)
        return num_faults >= min(resume.max_attempts, plan.num_groups)

    def _was_prompt(self, ask: Ask, now_s: float) -> bool:
        """Whether it was refused on arrival, or later because expected room or its place went."""
        assert ask.error is not None
        details = ask.error.details() or ""
        is_hoped_for = "took its place" in details or "was expected" in details
        if is_hoped_for or ask.begin_s < _START_S or self._num_faults(ask):
            return True
        return now_s - ask.begin_s < _SLACK_S

    def _is_any_idle(self, now_s: float) -> bool:
        """Whether a group has been idle for a while with no requests on their way."""
        if sum(one.begin_s > now_s - _IDLE_S for one in self._clients.asks) > 1:
            return False
        idle_since = [group.engine_loop.idle_since_s for group in self._cluster.groups]
        return any(since_s is not None and now_s - since_s > _IDLE_S for since_s in idle_since)

    def _num_faults(self, ask: Ask) -> int:
        """Number of faults that may have affected ``ask``.

        A poison request counts as many times as it may kill groups.
        """
        since_s = ask.begin_s - _AFTERMATH_S
        num_faults = sum(
            fault.end_s is None or fault.end_s > since_s for fault in self._chaos.faults
        )
        max_deaths = self._cluster.plan.gateway.completion.max_group_deaths
        # One more for each further completion, which may run on another group at the same time.
        num_killed = sum(max_deaths + one.num_answers - 1 for one in self._poisons(ask))
        return num_faults + num_killed

    def _poisons(self, ask: Ask) -> list[Ask]:
        """Requests that may have killed groups during ``ask``."""
        since_s = ask.begin_s - _AFTERMATH_S
        return [
            one
            for one in self._clients.asks
            if (one.end_s is None or one.end_s > since_s) and one.is_poison
        ]
