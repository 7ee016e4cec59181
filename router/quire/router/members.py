"""The groups to route to, in one order, with their loads as arrays for decisions."""

import itertools
from array import array
from collections.abc import Iterable

import numpy as np

from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column
from quire.router.policies.speeds import Rates, Speeds
from quire.router.prefix_index.directory import GroupId
from quire.router.prefix_index.index import Lengths, Slot
from quire.router.reservations import Group


class Members:
    def __init__(self) -> None:
        self.groups: dict[GroupId, Group] = {}
        self.rates = Rates.new()  # Of all groups that ever were.
        self.loads = Loads(())
        self.numbers = array("Q")
        self._new_numbers = itertools.count()
        # By tier and position; a group with fewer tiers has its last one again.
        self._slots = np.empty((1, 0), dtype=np.intp)
        self._is_heard = np.empty(0, dtype=np.int64)

    def update(self, names: Iterable[GroupId]) -> set[GroupId]:
        """Makes exactly these groups the members; returns who left."""
        groups, names = self.groups, set(names)
        if names == groups.keys():
            return set()
        left = groups.keys() - names
        for name in left:
            groups.pop(name).loads = None
        for name in names - groups.keys():
            groups[name] = Group(name, next(self._new_numbers), Speeds(self.rates))
        self.numbers = array("Q", [group.number for group in groups.values()])
        self.loads = Loads([group.state for group in groups.values()], common=self.rates)
        num_tiers = max((len(group.slots) for group in groups.values()), default=0)
        self._slots = np.zeros((max(num_tiers, 1), len(groups)), dtype=np.intp)
        self._is_heard = np.zeros(len(groups), dtype=np.int64)
        for position, group in enumerate(groups.values()):
            group.position, group.loads = position, self.loads
            self.loads.put_speeds(position, group.speeds)
            group.put_fetch_costs()
            self.heard(group.group_id, group.slots)
        return left

    def heard(self, group_id: GroupId, slots: tuple[Slot, ...]) -> None:
        """The directory knows the group's tiers as ``slots``, if it does."""
        group = self.groups.get(group_id)
        if group is None or not slots:
            return
        group.slots = slots
        if more := len(slots) - len(self._slots):
            if more > 0:
                self._slots = np.pad(self._slots, ((0, more), (0, 0)), mode="edge")
            slots = slots + slots[-1:] * -more
        self._slots[:, group.position], self._is_heard[group.position] = slots, 1

    def by_slot(self, lengths: Lengths) -> "array[int]":
        """For each member, the length of the prefix in its KV cache."""
        if not len(lengths):
            return array("q", bytes(8 * len(self.groups)))
        return array("q", (lengths.take(self._slots[0]) * self._is_heard).tobytes())

    @property
    def num_tiers(self) -> int:
        """The most that a group has."""
        return len(self._slots)

    def slower_tiers(self, lengths: Lengths) -> Column:
        """The same for each slower tier and those before it, by tier and member."""
        if not len(lengths):
            return np.zeros((len(self._slots) - 1, len(self.groups)))
        slower: Column = (lengths.take(self._slots[1:]) * self._is_heard).astype(np.float64)
        return slower
