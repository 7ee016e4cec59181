"""Chooses the *source* of a prompt: the group from which others fetch its leading KV blocks.

A source may be a group that takes no requests any more, such as a draining one.
"""

from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import NamedTuple

import numpy as np

from quire.router.policies.policy import Column
from quire.router.prefix_index.directory import GroupId
from quire.router.prefix_index.index import Lengths, Slot
from quire.router.reservations import Group

_SLOWEST_LENT_TIER = 1
"""Index of host memory: blocks on disk are not sent, since they would have to be read first."""
_SHUNNED_FOR_S = 30.0
"""Seconds for which a source is not chosen after a fetch from it failed."""


class Source(NamedTuple):
    """A group that has the leading ``num_blocks`` blocks of a request."""

    group: GroupId
    num_blocks: int


class Lenders:
    """The groups that exchange blocks, and how many requests fetch from each."""

    def __init__(self) -> None:
        self.names: list[GroupId] = []
        self.takes_G: Column = np.empty(0)
        """1 for each member that exchanges, else 0."""
        self._slots = np.empty(0, dtype=np.intp)
        self._members: list[Group | None] = []
        self._shunned_until_s: dict[GroupId, float] = {}
        self._num_asked: dict[GroupId, int] = {}

    def update(
        self,
        names: Collection[GroupId],
        members: Mapping[GroupId, Group],
        slots: Callable[[GroupId], tuple[Slot, ...]],
    ) -> None:
        """Makes ``names`` the groups that exchange blocks. ``slots`` returns the directory's slots
        of a group's tiers."""
        self.names = [name for name in names if slots(name)]
        lent = [slots(name)[: _SLOWEST_LENT_TIER + 1][-1] for name in self.names]
        self._slots = np.array(lent, dtype=np.intp)
        self._members = [members.get(name) for name in self.names]
        self.takes_G = np.array([float(name in names) for name in members])
        for kept in (self._shunned_until_s, self._num_asked):
            for name in kept.keys() - names:
                del kept[name]

    def best(self, lengths: Lengths, *, now_s: float) -> Source | None:
        """The group with the most leading blocks of a prompt; None if no group has any. Ties go to
        the group whose step ends first, then to the one that the fewest requests fetch from, then
        to the one with the fewest queued tokens."""
        if not self.names:
            return None
        lent = lengths.take(self._slots)
        if self._shunned_until_s:
            lent *= [self._shunned_until_s.get(name, 0.0) <= now_s for name in self.names]
        most = int(lent.max())
        if not most:
            return None
        ties = (lent == most).nonzero()[0].tolist()
        best = ties[0]
        if len(ties) > 1:
            best = min(ties, key=lambda index: self._load(index, now_s))
        return Source(self.names[best], most)

    def asked(self, group_id: GroupId, num: int) -> None:
        """Adds ``num``, which may be negative, to the requests that fetch from the group."""
        left = self._num_asked.get(group_id, 0) + num
        if left > 0:
            self._num_asked[group_id] = left
        else:
            self._num_asked.pop(group_id, None)

    def failed(self, group_id: GroupId, *, now_s: float) -> None:
        """Avoids the group for `_SHUNNED_FOR_S` after a fetch from it failed."""
        if group_id in self.names:
            self._shunned_until_s[group_id] = now_s + _SHUNNED_FOR_S

    def _load(self, index: int, now_s: float) -> tuple[float, int, float]:
        member = self._members[index]
        if member is None:  # A group that takes no requests is about to leave.
            return inf, 0, 0
        num_asked = self._num_asked.get(self.names[index], 0)
        return member.state.step_rest_s(now_s), num_asked, member.state.num_queued_tokens
