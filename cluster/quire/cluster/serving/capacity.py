"""How many requests the replica groups can begin within a time, learnt from their frames.

`quire.cluster.serving.headroom` says it of groups whose speeds are known,
`quire.cluster.serving.speeds` what these are.

A gateway sees the requests of the other gateways only in the groups' frames. Until then it assumes
that each of them sent as many as itself. So several gateways together fill the visible room once,
not once each; a gateway that alone has requests fills it too, over as many frames as there are
gateways.

Few groups are examined one by one. Of many groups the first ones are examined one by one, which is
enough as long as groups are free; otherwise all are evaluated at once, from arrays. Both ways give
the same result.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from quire.cluster.serving.headroom import Ask, Headroom, room_of
from quire.cluster.serving.speeds import GroupPace, OutputLength, Speeds
from quire.router.policies.policy import GroupState
from quire.router.prefix_index.directory import GroupId
from quire.v1 import group_pb2 as pb

MANY = 16
"""With fewer groups, one by one is faster; of more, this number are tried one by one first."""


class Capacity:
    """One gateway's estimate of the groups' speed."""

    def __init__(
        self, *, num_to_compute: Callable[[float], float] = float, many: int = MANY
    ) -> None:
        """``num_to_compute``: of so many prompt tokens, those that no group has cached. From
        ``many`` groups on, arrays are used; that changes no answer.
        """
        self._num_to_compute = num_to_compute
        self.num_gateways = 1
        """The number of gateways, this one included: the highest that any group reports, because
        all gateways attach within a moment to a group that has just started or lost some."""
        self._groups: dict[GroupId, GroupPace] = {}
        self._all = Speeds()  # Assumed for a group that has not been observed.
        self._outputs = OutputLength()
        self._many = max(many, 1)
        self._rooms: Headroom | None = (
            None  # Of those whose states were last shown, if they are many.
        )

    def observe(
        self,
        description: pb.GroupDescription,
        load: pb.Load,
        *,
        now_s: float,
        is_awaited: bool = False,
    ) -> None:
        """Takes in a group's load after a step. ``is_awaited``: requests wait at the gateway."""
        group_id = GroupId(description.group_id)
        pace = self._groups.get(group_id)
        if pace is None or pace.epoch != description.epoch:
            pace = self._groups[group_id] = GroupPace(description, self._all)
            self._count_gateways()
        if pace.num_gateways != load.num_gateways:
            pace.num_gateways = load.num_gateways
            self._count_gateways()
        pace.observe(load, now_s, is_awaited=is_awaited)
        if self._rooms is not None:
            self._rooms.heard(group_id)

    def keep(self, groups: Iterable[GroupId]) -> None:
        """Forgets all groups but these."""
        wanted = set(groups)
        self._groups = {name: pace for name, pace in self._groups.items() if name in wanted}
        self._rooms = None
        self._count_gateways()

    def asked(self, max_tokens: int) -> None:
        """A completion begins that may be ``max_tokens`` long."""
        self._outputs.asked(max_tokens)

    def generated(self, num_tokens: int) -> None:
        """Counts further tokens of this gateway's completions."""
        self._outputs.generated(num_tokens)

    def ended(self, num_completions: int) -> None:
        """Counts completions that have ended."""
        for _ in range(num_completions):
            self._outputs.ended()

    def room(
        self,
        states: Sequence[GroupState],
        *,
        wait_s: float,
        tokens_each: float,
        enough: float = inf,
    ) -> float:
        """How many requests beyond those sent could begin within ``wait_s``.

        Each has a prompt of ``tokens_each``. May stop counting at ``enough``. Each group is there
        once; neither ``states`` nor what is in it ever changes, as with `RoutingTable.states`.
        """
        ask = Ask(wait_s, max(self._num_to_compute(tokens_each), 1.0), self._outputs.mean)
        if self._rooms is not None and self._rooms.shows(states):
            return self._rooms.room(ask)
        num_requests = 0.0
        for state in states[: self._many]:
            pace = self._pace_of(state.group)
            num_requests += room_of(state, pace, ask, num_gateways=self.num_gateways)
            if num_requests >= enough:
                return num_requests
        if len(states) < self._many:
            return num_requests
        return self._rooms_of(states).room(ask)

    def begun_per_s(self, states: Sequence[GroupState], *, tokens_each: float) -> float:
        """How many requests the groups begin per second when they have enough of them."""
        tokens_each, mean = max(self._num_to_compute(tokens_each), 1.0), self._outputs.mean
        if len(states) >= self._many:
            rooms = self._rooms_of(states)
            return rooms.begun_per_s(tokens_each=tokens_each, mean_output=mean)
        paces = [self._pace_of(state.group) for state in states]
        return sum(pace.begun_per_s(tokens_each=tokens_each, mean_output=mean) for pace in paces)

    def num_queued(self, states: Sequence[GroupState]) -> tuple[int, int]:
        """How many requests wait at the groups, and how many were sent beyond these."""
        if len(states) >= self._many:
            return self._rooms_of(states).num_queued()
        num_waiting = sum(state.num_waiting for state in states)
        return num_waiting, sum(state.num_reserved_requests for state in states)

    def _count_gateways(self) -> None:
        before = self.num_gateways
        self.num_gateways = max((pace.num_gateways for pace in self._groups.values()), default=1)
        self.num_gateways = max(self.num_gateways, 1)  # A group may not say.
        if self.num_gateways != before:
            self._rooms = None

    def _rooms_of(self, states: Sequence[GroupState]) -> Headroom:
        if self._rooms is None or not self._rooms.follow(states):
            self._rooms = Headroom(states, self._pace_of, self._all, num_gateways=self.num_gateways)
        return self._rooms

    def _pace_of(self, group: GroupId) -> GroupPace:
        pace = self._groups.get(group)
        if pace is None:  # It is attached, but has sent no load yet.
            pace = GroupPace(pb.GroupDescription(), self._all)
        return pace
