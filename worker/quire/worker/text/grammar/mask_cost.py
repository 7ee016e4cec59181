"""The CPU time of masks of one tenant's grammar, and its limits.

Usual grammars take 20 to 200 µs for a mask and 3 ms at most. Ambiguous ones take up to 160 ms, and
as much to consume a token (llguidance 1.9.1). Costs are seconds of CPU time, so that a busy or
suspended machine does not end requests.
"""

from quire.worker.text.grammar.recent import RecentSeconds

_TRUSTED_S, _NUM_TRUSTED = 0.0005, 16
"""A grammar is trusted if its mean time for a mask is at most this after this many masks."""
_SLOW_S = 0.001
ALLOWANCE_S = 0.005
"""Allowed time per token: 25 times the p99 of usual grammars. Time above it adds up as excess."""
MAX_EXCESS_S = 1.0
"""Most excess of one grammar."""
MAX_TENANT_EXCESS_S, _LEAST_EXCESS_S = 2.0, 0.25
"""Most recent excess of all grammars of a tenant, decayed over time; and the excess that each of
its grammars may then still have."""
_CLEAN_S = 0.05
_FAILURE_S = 0.1
"""The cost charged to a grammar for a request that exceeded llguidance's limits."""


class MaskCost:
    """The costs of one grammar of one tenant, shared by all of its requests."""

    def __init__(self, tenant: RecentSeconds) -> None:
        self.tenant = tenant
        """Excess of all grammars of the tenant in about the last minute."""
        self.excess_s = 0.0
        self.mean_s = 0.0
        """Mean time of about the last 16 masks."""
        self._num = 0
        self.is_spent = False
        """Whether its limit is exceeded: its requests must end, and no other may begin."""

    def charge(self, cost_s: float, *, num_tokens: int = 1) -> None:
        """Adds the cost of one mask and of consuming the ``num_tokens`` before it."""
        self._num = min(self._num + 1, _NUM_TRUSTED)
        self.mean_s += (cost_s - self.mean_s) / self._num
        excess_s = cost_s - ALLOWANCE_S * num_tokens
        if excess_s > 0:
            self.tenant.add(excess_s)
        self._add(excess_s)

    def failed(self) -> None:
        """Adds the cost of a request that ended because its next mask exceeded llguidance's limits.
        After several of them, no other request may begin."""
        self._add(_FAILURE_S)

    def _add(self, excess_s: float) -> None:
        self.excess_s = max(0.0, self.excess_s + excess_s)
        is_poor = self.tenant.sum_s > MAX_TENANT_EXCESS_S
        self.is_spent |= self.excess_s > (_LEAST_EXCESS_S if is_poor else MAX_EXCESS_S)

    @property
    def is_slow(self) -> bool:
        """Whether its masks are only computed in the time reserved for slow masks."""
        return self.mean_s > _SLOW_S

    @property
    def is_trusted(self) -> bool:
        """Whether the engine's thread may compute its masks, also those of draft tokens."""
        is_known = self._num == _NUM_TRUSTED and self.mean_s <= _TRUSTED_S
        return is_known and self.tenant.sum_s < _CLEAN_S

    @property
    def error(self) -> str:
        """The error message for requests with a spent grammar."""
        return (
            f"finding the tokens that may come next takes {self.excess_s:.2f} s of CPU time more "
            f"than {1e3 * ALLOWANCE_S:g} ms a token, which is too much: the grammar is ambiguous, "
            "so that a text can be read in very many ways. Write rules so that one text is read in "
            "one way, for example 'list: item+' instead of 'list: list list | item', and parts of "
            "words as one terminal"
        )
