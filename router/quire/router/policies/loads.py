"""The groups' loads: `GroupState`, each number of which is an array over the groups.

With arrays, the costs of five hundred groups take as long as those of sixteen one by one.
`RoutingTable` updates them as groups change, so that a decision does not visit every group.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from quire.router.policies.policy import Column, GroupState

LATE_STEPS = 2.0
"""A step that exceeds its expected time by this factor says nothing: the guess was wrong, or its
frame went to other gateways only, or the group hangs."""


class Loads:
    """The numbers of each group in ``states`` as arrays; arrays and states always agree."""

    def __init__(self, states: Sequence[GroupState]) -> None:
        self.names = tuple(state.group for state in states)
        """One object for as long as the groups are the same."""
        self._set(list(states), np.empty((10, len(states))))
        # A number is written through one of these in half the time that the array takes.
        self._rows = [row.data for row in self._table]
        for position, state in enumerate(states):
            self.put(position, state)

    def __len__(self) -> int:
        return len(self.states)

    def put(self, position: int, state: GroupState) -> None:
        """The group at ``position`` is in this state now."""
        self.states[position] = state
        running, waiting, pending, requests, tokens, step_tokens = self._rows[:6]
        available, blocks, began_s, step_s = self._rows[6:]
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
        # An unknown step counts as just begun.
        step_s[position] = state.step_s or inf

    @property
    def num_queued_tokens(self) -> Column:
        return self.num_pending_prefill_tokens + self.num_reserved_tokens

    @property
    def num_requests(self) -> Column:
        return self.num_running + self.num_waiting + self.num_reserved_requests

    def step_over(self, now_s: float) -> Column:
        """Which share of each group's present step is over; 0 where nothing is known."""
        share = (now_s - self._step_began_s) / self._step_s
        over: Column = np.minimum(np.maximum(share, 0.0), 1.0) * (share < LATE_STEPS)
        return over

    def only(self, positions: Sequence[int]) -> "Loads":
        """The groups at these positions, as they are now; nothing is put into it."""
        few = Loads.__new__(Loads)
        few.names = tuple(self.names[position] for position in positions)
        few._set([self.states[position] for position in positions], self._table[:, positions])
        return few

    def copy(self) -> "Loads":
        """All groups, as they are now; nothing is put into it."""
        same = Loads.__new__(Loads)
        same.names = self.names
        same._set(self.states.copy(), self._table.copy())
        return same

    def _set(self, states: list[GroupState], table: Column) -> None:
        self.states = states
        self._table = table
        self.num_running: Column
        self.num_waiting: Column
        self.num_pending_prefill_tokens: Column
        self.num_reserved_requests: Column
        self.num_reserved_tokens: Column
        self.num_step_tokens: Column
        self.num_available_blocks: Column  # Infinite where it is not known.
        self.num_blocks: Column
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
        ) = table
