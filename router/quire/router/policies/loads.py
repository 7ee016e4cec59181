"""The groups' loads and speeds as arrays: one array over the groups per number of `GroupState`.

With arrays, computing the costs of 500 groups takes as long as a loop over 16. `RoutingTable`
updates the arrays as groups change, so that a decision does not visit every group.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from quire.router.policies.fetching import GUESSED_2K
from quire.router.policies.policy import LATE_STEPS, Column, GroupState
from quire.router.policies.speeds import (
    MIN_PER_S,
    PRIOR_OUTPUT_PER_S,
    PRIOR_PREFILL_PER_S,
    Rates,
    Speeds,
)

_NUM_ROWS = 12
"""Rows for the numbers of a `GroupState`. After them: the rates' terms, the costs of fetching."""


class Loads:
    """The numbers of each group in ``states`` as arrays; arrays and states always agree."""

    _from_frames: tuple[int, Column] | None = None
    """Cache of `most_gateways` and `speeds`, valid until the next frame."""
    _over: tuple[float, Column] | None = None
    """Cache of `step_over` and its time, valid until a group changes."""

    def __init__(self, states: Sequence[GroupState], *, common: Rates | None = None) -> None:
        """``common``: the rates of all groups, assumed for a group with few observations."""
        self.names = tuple(state.group for state in states)
        table = np.empty((_NUM_ROWS + 9 + GUESSED_2K.size, len(states)))
        self._set(list(states), table, common or Rates.new())
        # Writing a number through a memoryview takes half as long as through the array.
        self._rows = [row.data for row in self._table[:_NUM_ROWS]]
        self._terms[:] = _terms(Rates.new())
        self.fetch_costs_2KG[:] = GUESSED_2K[:, :, np.newaxis]
        for position, state in enumerate(states):
            self.put(position, state)

    def __len__(self) -> int:
        return len(self.states)

    def put(self, position: int, state: GroupState) -> None:
        """Sets the state of the group at ``position``."""
        self.states[position] = state
        self._over = None
        running, waiting, pending, requests, tokens, step_tokens = self._rows[:6]
        available, blocks, began_s, step_s, slots, gateways = self._rows[6:]
        running[position] = state.num_running
        waiting[position] = state.num_waiting
        pending[position] = state.num_pending_prefill_tokens
        requests[position] = state.num_reserved_requests
        tokens[position] = state.num_reserved_tokens
        step_tokens[position] = state.num_step_tokens
        is_known = state.num_available_blocks is not None
        available[position] = state.num_available_blocks if is_known else inf
        blocks[position] = state.num_blocks or 0
        began_s[position] = state.step_began_s
        # An unknown step counts as just begun: with an infinite length, no share of it is over.
        step_s[position] = state.step_s or inf
        slots[position] = state.max_num_seqs or inf
        gateways[position] = state.num_gateways

    def put_fetch_costs(self, position: int, costs_2K: Column) -> None:
        """Sets the costs of fetching of the group at ``position``; see `FetchCosts.tokens`."""
        self.fetch_costs_2KG[:, :, position] = costs_2K

    def put_speeds(self, position: int, speeds: Speeds) -> None:
        """Sets the rates of the group at ``position``."""
        self._terms[:, :, position] = _terms(speeds.own)[:, :, 0]
        self._from_frames = None

    @property
    def num_queued_tokens(self) -> Column:
        return self.num_pending_prefill_tokens + self.num_reserved_tokens

    @property
    def num_requests(self) -> Column:
        return self.num_running + self.num_waiting + self.num_reserved_requests

    @property
    def most_gateways(self) -> int:
        """Number of gateways, this one included: the largest that any group reports. A group that
        has just started, or lost connections, reports too few until all gateways have attached."""
        return self._of_frames()[0]

    @property
    def speeds(self) -> Column:
        """Each group's rates in tokens per second, in the order of `Rates`."""
        return self._of_frames()[1]

    @property
    def step_parts(self) -> tuple[float, float] | None:
        """``(fixed, per_sequence)`` seconds of a step that computes no prompt; None if unknown."""
        return self._common.steps.parts

    def _of_frames(self) -> tuple[int, Column]:
        if self._from_frames is None:
            slots = np.where(np.isinf(self.max_num_seqs), 1.0, self.max_num_seqs)
            prior = PRIOR_OUTPUT_PER_S * np.broadcast_to(slots, (3, len(self)))
            prior[0] = PRIOR_PREFILL_PER_S
            speeds = _per_s(self._terms, _per_s(_terms(self._common), prior))
            self._from_frames = int(max(self.num_gateways.max(initial=0), 1)), speeds
        return self._from_frames

    def step_over(self, now_s: float) -> Column:
        """The completed share of each group's current step, 0 to 1; 0 if unknown."""
        if self._over is None or self._over[0] != now_s:
            share = (now_s - self._step_began_s) / self._step_s
            over: Column = np.minimum(np.maximum(share, 0.0), 1.0) * (share < LATE_STEPS)
            self._over = now_s, over
        return self._over[1]

    def step_rest(self, now_s: float) -> Column:
        """Prompt tokens that each group's current step has yet to compute."""
        rest: Column = self.num_step_tokens * (1.0 - self.step_over(now_s))
        return rest

    def only(self, positions: Sequence[int]) -> "Loads":
        """A snapshot of the groups at these positions; do not call `put` on it."""
        few = Loads.__new__(Loads)
        few.names = tuple(self.names[position] for position in positions)
        states = [self.states[position] for position in positions]
        few._set(states, self._table[:, positions], self._common)
        return few

    def copy(self) -> "Loads":
        """A snapshot of all groups; do not call `put` on it."""
        same = Loads.__new__(Loads)
        same.names = self.names
        same._set(self.states.copy(), self._table.copy(), self._common)
        same._from_frames = self._of_frames()
        return same

    def _set(self, states: list[GroupState], table: Column, common: Rates) -> None:
        self.states = states
        self._table = table
        self._terms = table[_NUM_ROWS : _NUM_ROWS + 9].reshape(3, 3, len(states))
        # See `FetchCosts.tokens`.
        self.fetch_costs_2KG: Column = table[_NUM_ROWS + 9 :].reshape(
            *GUESSED_2K.shape, len(states)
        )
        self._common = common
        self.num_running: Column
        self.num_waiting: Column
        self.num_pending_prefill_tokens: Column
        self.num_reserved_requests: Column
        self.num_reserved_tokens: Column
        self.num_step_tokens: Column
        self.num_available_blocks: Column  # Infinite if unknown.
        self.num_blocks: Column
        self.max_num_seqs: Column  # Infinite if the group does not report it.
        self.num_gateways: Column
        (
            self.num_running,
            self.num_waiting,
            self.num_pending_prefill_tokens,
            self.num_reserved_requests,
            self.num_reserved_tokens,
            self.num_step_tokens,
            self.num_available_blocks,
            self.num_blocks,
            self._step_began_s,
            self._step_s,
            self.max_num_seqs,
            self.num_gateways,
        ) = table[:_NUM_ROWS]


def _terms(rates: Rates) -> Column:
    """`Rate.terms` of each rate, in the shape (3 terms, 3 rates, 1)."""
    prefill, full, short, _ = rates
    return np.array((prefill.terms, full.terms, short.terms)).T[:, :, np.newaxis]


def _per_s(terms: Column, prior: Column) -> Column:
    """`Rate.per_s`, vectorized."""
    amount, prior_s, time_s = terms
    per_s: Column = np.maximum((amount + prior * prior_s) / time_s, MIN_PER_S)
    return per_s
