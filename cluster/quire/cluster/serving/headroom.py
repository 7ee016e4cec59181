"""How many requests the groups can begin within a time.

A request waits for three things, and begins when it has the last of them:

    prefill  prompt tokens ahead of it           over  prompt tokens computed per second
    a slot   sequences that must end before it   over  sequences that end per second
    blocks   KV that must be let go before it    over  blocks let go per second

The groups' loads come as arrays; their speeds are kept here, as arrays in the same order.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.cluster.serving.speeds import (
    MIN_PER_S,
    PRIOR_OUTPUT_PER_S,
    PRIOR_PREFILL_PER_S,
    GroupPace,
    Speeds,
)
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Column
from quire.router.prefix_index.directory import GroupId

_NUM_SPEEDS = 3


class Ask(NamedTuple):
    """Within which time, and for requests of which size."""

    wait_s: float
    tokens_each: float
    """To compute; 1 at least."""
    mean_output: float


class Headroom:
    """Room in the groups, whose speeds are those at the last calls to `heard`."""

    def __init__(self, pace_of: Callable[[GroupId], GroupPace], others: Speeds) -> None:
        """``others``: the speeds that `GroupPace` assumes for a group with few observations."""
        self._pace_of = pace_of
        self._others = others
        self._names: tuple[GroupId, ...] = ()
        self._stale: set[GroupId] = set()
        self._speeds: Column | None = None
        self._follow(())

    def heard(self, group: GroupId) -> None:
        """The group's speeds have changed, and with them the averages over all groups."""
        self._speeds = None
        self._stale.add(group)

    def room(self, loads: Loads, ask: Ask, *, num_gateways: int) -> float:
        """How many requests beyond those sent all groups together could begin."""
        if not len(loads):
            return 0.0
        wait_s, tokens_each, mean_output = ask
        speeds = self._speeds_of(loads)
        num_full, num_short = speeds[1:] / mean_output * wait_s  # Sequences that end until then.
        tokens_ahead = loads.num_pending_prefill_tokens + loads.num_reserved_tokens * num_gateways
        # The last request begins when the tokens ahead of it have been computed, without its own.
        spare_tokens = speeds[0] * wait_s - tokens_ahead
        room: Column = (spare_tokens / tokens_each + 1) * (spare_tokens >= 0)
        ahead = loads.num_waiting + loads.num_reserved_requests * num_gateways
        slots = self._num_seqs - loads.num_running - ahead + num_full
        if self._num_silent:  # A group that says no number of slots is full if some wait.
            any_or_none = np.where(loads.num_waiting > 0, -np.inf, np.inf)
            slots = np.where(self._is_silent, any_or_none, slots)
        np.minimum(room, slots, out=room)
        running, available = loads.num_running, loads.num_available_blocks
        held = np.maximum(loads.num_blocks - available, 0)
        num_let_go = num_short * held / np.maximum(running, 1)
        num_wanted = loads.num_queued_tokens / self._block_size + running
        spare = available + num_let_go - num_wanted
        in_blocks = spare / (tokens_each / self._block_size + 1)
        np.minimum(room, in_blocks, out=room, where=running > 0)
        # An idle group can begin one request, whatever its speed.
        np.maximum(room, loads.num_requests == 0, out=room)
        # Sums up from the first to the last, which `numpy.sum` does not.
        return float(np.add.accumulate(room)[-1])

    def begun_per_s(self, loads: Loads, *, tokens_each: float, mean_output: float) -> float:
        """How many requests the groups begin per second when they have enough of them."""
        prefill, full, _ = self._speeds_of(loads)
        per_s = prefill / tokens_each
        np.minimum(per_s, full / mean_output, out=per_s, where=~self._is_silent)
        total: float = sum(per_s.tolist())
        return total

    def _speeds_of(self, loads: Loads) -> Column:
        """Prompt tokens per second, output tokens with every slot taken, and with slots left."""
        if loads.names is not self._names:
            self._follow(loads.names)
        for group in self._stale:
            if group in self._positions:
                self._put(self._positions[group], self._pace_of(group))
        if self._stale:
            self._stale.clear()
            self._num_silent = int(self._is_silent.sum())
        if self._speeds is None:
            others = np.array(self._others.terms()).reshape(3, _NUM_SPEEDS, 1)
            self._speeds = _per_s(self._terms, _per_s(others, self._prior))
        return self._speeds

    def _follow(self, names: tuple[GroupId, ...]) -> None:
        self._names = names
        self._positions = {name: position for position, name in enumerate(names)}
        self._block_size, self._num_seqs = np.empty((2, len(names)))
        self._is_silent = np.zeros(len(names), dtype=bool)
        self._num_silent = 0
        self._terms = np.empty((3, _NUM_SPEEDS, len(names)))
        self._prior = np.empty((_NUM_SPEEDS, len(names)))
        self._prior[0] = PRIOR_PREFILL_PER_S
        self._speeds = None
        self._stale.update(names)

    def _put(self, position: int, pace: GroupPace) -> None:
        self._block_size[position] = pace.block_size
        self._num_seqs[position] = pace.max_num_seqs or 1
        self._is_silent[position] = pace.max_num_seqs is None
        self._prior[1:, position] = PRIOR_OUTPUT_PER_S * (pace.max_num_seqs or 1)
        self._terms[:, :, position] = np.reshape(pace.own.terms(), (3, _NUM_SPEEDS))


def _per_s(terms: Column, prior: Column) -> Column:
    """`Rate.per_s` of many."""
    amount, prior_s, time_s = terms
    per_s: Column = np.maximum((amount + prior * prior_s) / time_s, MIN_PER_S)
    return per_s
