"""How many requests the groups can begin within a time.

A request waits for three things, and begins when it has the last of them:

    prefill  prompt tokens ahead of it           over  prompt tokens computed per second
    a slot   sequences that must end before it   over  sequences that end per second
    blocks   KV that must be let go before it    over  blocks let go per second

Each group's numbers are kept in arrays, and the sum is taken in the groups' order.
"""

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not
from typing import Any, NamedTuple

import numpy as np

from quire.cluster.serving.speeds import (
    MIN_PER_S,
    PRIOR_OUTPUT_PER_S,
    PRIOR_PREFILL_PER_S,
    GroupPace,
    Speeds,
)
from quire.router.policies.policy import Column, GroupState
from quire.router.prefix_index.directory import GroupId

_CHUNK = 32
"""Number of groups that are compared with their former states at a time."""
_MAX_REMEMBERED = 8
"""Number of cached answers; a request asks two or three questions, one of them several times."""
_NUM_SPEEDS = 3


class Ask(NamedTuple):
    """Within which time, and for requests of which size."""

    wait_s: float
    tokens_each: float
    """To compute; 1 at least."""
    mean_output: float


class Headroom:
    """Room in many groups, one entry each, as of the last calls to `heard` and `follow`."""

    def __init__(
        self,
        states: Sequence[GroupState],
        pace_of: Callable[[GroupId], GroupPace],
        others: Speeds,
        *,
        num_gateways: int,
    ) -> None:
        """``others``: the speeds that `GroupPace` assumes for a group with few observations."""
        self._states = states
        self._pace_of = pace_of
        self._others = others
        self._num_gateways = num_gateways
        self._positions = {state.group: position for position, state in enumerate(states)}
        self._stale: set[GroupId] = set()
        self._speeds: Column | None = None
        self._answers: dict[Ask, float] = {}
        # In the order in which `_put` has the numbers of one.
        table = np.empty((11 + 3 * _NUM_SPEEDS, len(states)))
        self._waiting, self._reserved, self._tokens_ahead, self._slots, self._least = table[:5]
        self._running, self._held, self._available, self._wanted, self._block_size = table[5:10]
        self._num_seqs = table[10]
        self._terms = table[11:].reshape(_NUM_SPEEDS, 3, len(states))
        # A number is written through one of these in half the time that the array takes.
        self._rows: list[Any] = [row.data for row in table]
        for position, state in enumerate(states):
            self._put(position, state)

    def heard(self, group: GroupId) -> None:
        """The group's speeds have changed, and with them the averages over all groups."""
        self._speeds = None
        self._answers.clear()
        if group in self._positions:
            self._stale.add(group)

    def follow(self, states: Sequence[GroupState]) -> bool:
        """Takes the groups' current states. False if they belong to other groups: build a new one.

        A state is replaced and never changed in place; nor does the caller change ``states``.
        """
        before = self._states
        changed = {self._positions[group] for group in self._stale}
        if states is not before:
            if len(states) != len(before):
                return False
            for begin in range(0, len(states), _CHUNK):
                olds, news = before[begin : begin + _CHUNK], states[begin : begin + _CHUNK]
                if olds != news:
                    changed.update(compress(count(begin), map(is_not, news, olds)))
            if any(states[position].group != before[position].group for position in changed):
                return False
            self._states = states
            self._answers.clear()
        for position in changed:
            self._put(position, states[position])
        self._stale.clear()
        return True

    def num_queued(self) -> tuple[int, int]:
        """How many requests wait at the groups, and how many were sent beyond these."""
        return int(self._waiting.sum()), int(self._reserved.sum())

    def room(self, ask: Ask) -> float:
        """How many requests beyond those sent all groups together could begin."""
        if not self._states:
            return 0.0
        answer = self._answers.get(ask)
        if answer is None:
            if len(self._answers) >= _MAX_REMEMBERED:
                self._answers.clear()
            # Sums up from the first to the last, which `numpy.sum` does not.
            answer = float(np.add.accumulate(self._rooms(ask))[-1])
            self._answers[ask] = answer
        return answer

    def begun_per_s(self, *, tokens_each: float, mean_output: float) -> float:
        """How many requests the groups begin per second when they have enough of them."""
        prefill, full, _ = self._speeds_now()
        per_s = prefill / tokens_each
        np.minimum(per_s, full / mean_output, out=per_s, where=np.isfinite(self._slots))
        total: float = sum(per_s.tolist())
        return total

    def _rooms(self, ask: Ask) -> Column:
        wait_s, tokens_each, mean_output = ask
        prefill, full, short = self._speeds_now()
        # The last request begins when the tokens ahead of it have been computed, without its own.
        spare_tokens = prefill * wait_s - self._tokens_ahead
        room: Column = (spare_tokens / tokens_each + 1) * (spare_tokens >= 0)
        np.minimum(room, self._slots + full / mean_output * wait_s, out=room)
        num_let_go = short / mean_output * wait_s * self._held / self._running
        spare = self._available + num_let_go - self._wanted
        np.minimum(room, spare / (tokens_each / self._block_size + 1), out=room)
        np.maximum(room, self._least, out=room)
        return room

    def _speeds_now(self) -> Column:
        """Prompt tokens per second, output tokens with every slot taken, and with slots left."""
        if self._speeds is None:
            prior = np.empty_like(self._terms[:, 0])
            prior[0] = PRIOR_PREFILL_PER_S
            prior[1:] = PRIOR_OUTPUT_PER_S * self._num_seqs
            others = np.array(self._others.terms()).reshape(_NUM_SPEEDS, 3, 1)
            self._speeds = _per_s(self._terms, _per_s(others, prior))
        return self._speeds

    def _put(self, position: int, state: GroupState) -> None:
        pace = self._pace_of(state.group)
        # A resource that does not limit a group must not be the minimum.
        ahead = state.num_waiting + state.num_reserved_requests * self._num_gateways
        if (
            pace.max_num_seqs is None
        ):  # One that does not say how many it runs is full if some wait.
            slots = -np.inf if state.num_waiting else np.inf
        else:
            slots = pace.max_num_seqs - state.num_running - ahead
        running, held, available = 1, 0, np.inf
        if state.num_available_blocks is not None and state.num_running:
            running, available = state.num_running, float(state.num_available_blocks)
            held = max(0, (state.num_blocks or 0) - state.num_available_blocks)
        numbers = (
            state.num_waiting,
            state.num_reserved_requests,
            state.num_pending_prefill_tokens + state.num_reserved_tokens * self._num_gateways,
            slots,
            0 if state.num_requests else 1,  # An idle group can begin one, whatever its speed.
            running,
            held,
            available,
            state.num_queued_tokens / pace.block_size + state.num_running,
            pace.block_size,
            pace.max_num_seqs or 1,
            *pace.own.terms(),
        )
        for row, number in zip(self._rows, numbers, strict=True):
            row[position] = number


def _per_s(terms: Column, prior: Column) -> Column:
    """`Rate.per_s` of many: terms are along the second axis."""
    amount, prior_s, time_s = terms[:, 0], terms[:, 1], terms[:, 2]
    per_s: Column = np.maximum((amount + prior * prior_s) / time_s, MIN_PER_S)
    return per_s
