"""How many requests the replica groups can begin within a time, learnt from their frames.

`quire.cluster.serving.headroom` says it of groups whose speeds are known,
`quire.cluster.serving.speeds` what these are.

A gateway sees the requests of the other gateways only in the groups' frames. Until then it assumes
that each of them sent as many as itself. So several gateways together fill the visible room once,
not once each; a gateway that alone has requests fills it too, over as many frames as there are
gateways.
"""

from collections.abc import Callable, Iterable

from quire.cluster.serving.headroom import Ask, Headroom
from quire.cluster.serving.speeds import GroupPace, OutputLength, Speeds
from quire.router.policies.loads import Loads
from quire.router.prefix_index.directory import GroupId
from quire.v1 import group_pb2 as pb


class Capacity:
    """One gateway's estimate of the groups' speed."""

    def __init__(self, *, num_to_compute: Callable[[float], float] = float) -> None:
        """``num_to_compute``: of so many prompt tokens, those that no group has cached."""
        self._num_to_compute = num_to_compute
        self.num_gateways = 1
        """The number of gateways, this one included: the highest that any group reports, because
        all gateways attach within a moment to a group that has just started or lost some."""
        self._groups: dict[GroupId, GroupPace] = {}
        self._all = Speeds()  # Assumed for a group that has not been observed.
        self._outputs = OutputLength()
        self._rooms = Headroom(self._pace_of, self._all)

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
        self._rooms.heard(group_id)

    def keep(self, groups: Iterable[GroupId]) -> None:
        """Forgets all groups but these."""
        wanted = set(groups)
        for name in self._groups.keys() - wanted:
            del self._groups[name]
            self._rooms.heard(name)
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

    def room(self, loads: Loads, *, wait_s: float, tokens_each: float) -> float:
        """How many requests beyond those sent could begin within ``wait_s``.

        Each has a prompt of ``tokens_each``.
        """
        ask = Ask(wait_s, max(self._num_to_compute(tokens_each), 1.0), self._outputs.mean)
        return self._rooms.room(loads, ask, num_gateways=self.num_gateways)

    def begun_per_s(self, loads: Loads, *, tokens_each: float) -> float:
        """How many requests the groups begin per second when they have enough of them."""
        tokens_each, mean = max(self._num_to_compute(tokens_each), 1.0), self._outputs.mean
        return self._rooms.begun_per_s(loads, tokens_each=tokens_each, mean_output=mean)

    def num_queued(self, loads: Loads) -> tuple[int, int]:
        """How many requests wait at the groups, and how many were sent beyond these."""
        return int(loads.num_waiting.sum()), int(loads.num_reserved_requests.sum())

    def _count_gateways(self) -> None:
        most = max((pace.num_gateways for pace in self._groups.values()), default=1)
        self.num_gateways = max(most, 1)  # A group may not say.

    def _pace_of(self, group: GroupId) -> GroupPace:
        pace = self._groups.get(group)
        if pace is None:  # It is attached, but has sent no load yet.
            pace = GroupPace(pb.GroupDescription(), self._all)
        return pace
