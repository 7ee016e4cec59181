"""The groups to route to, in a fixed order, with their loads as arrays for decisions."""

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
        self.rates = Rates.new()  # Over all groups, past ones included.
        self.loads = Loads(())
        self.numbers = array("Q")
        self._new_numbers = itertools.count()
        # Slots by tier and position; a group with fewer tiers repeats its last slot.
        self._slots = np.empty((1, 0), dtype=np.intp)
        self._is_heard = np.empty(0, dtype=np.int64)

    def update(self, names: Iterable[GroupId]) -> set[GroupId]:
        """Makes exactly these groups the members; returns the names of those that left."""
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
        """Sets the directory's slots of the group's tiers; ignored if ``slots`` is empty."""
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
        """For each member, how many leading blocks its KV cache holds. ``lengths`` is by slot."""
        if not len(lengths):
            return array("q", bytes(8 * len(self.groups)))
        return array("q", (lengths.take(self._slots[0]) * self._is_heard).tobytes())

    @property
    def num_tiers(self) -> int:
        """The largest number of tiers that a member has, the KV cache included."""
        return len(self._slots)

    def slower_tiers(self, lengths: Lengths) -> Column:
        """How many leading blocks each slower tier or a faster one holds: (tiers - 1, members)."""
        if not len(lengths):
            return np.zeros((len(self._slots) - 1, len(self.groups)))
        slower: Column = (lengths.take(self._slots[1:]) * self._is_heard).astype(np.float64)
        return slower
