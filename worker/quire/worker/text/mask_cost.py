"""What the masks of one tenant's grammar cost, and when that is too much.

Honest grammars take 20 to 200 µs a mask and 3 ms at most; ambiguous ones up to 160 ms, and as much
to take in a token (llguidance 1.9.1). Costs are seconds of CPU time, so that a machine that is
busy, or stood still, ends nobody's request.
"""

from quire.worker.text.recent import RecentSeconds

_TRUSTED_S, _NUM_TRUSTED = 0.0005, 16
"""The mean of a mask, and masks behind which it is relied on."""
_SLOW_S = 0.001
ALLOWANCE_S = 0.005
"""A token may take 25 times the p99 of honest grammars; what is above adds up."""
MAX_EXCESS_S = 1.0
"""The most that one grammar may take above its allowance."""
MAX_TENANT_EXCESS_S, _LEAST_EXCESS_S = 2.0, 0.25
"""The most that a tenant's grammars may take above theirs, older excess weighing less; and the
excess below which no grammar is to blame."""
_CLEAN_S = 0.05
_FAILURE_S = 0.1
"""What the grammar is charged for a request that its work ended."""


class MaskCost:
    """The account of one grammar of one tenant; all of its requests share it."""

    def __init__(self, tenant: RecentSeconds) -> None:
        self.tenant = tenant
        """What the tenant's grammars took above their allowance in the last minute or so."""
        self.excess_s = 0.0
        self.mean_s = 0.0
        """The mean of about the last 16 masks."""
        self._num = 0
        self.is_spent = False
        """Its requests are to end, and no other one is to begin."""

    def charge(self, cost_s: float, *, num_tokens: int = 1) -> None:
        """One more mask, and taking in the ``num_tokens`` before it, took ``cost_s``."""
        self._num = min(self._num + 1, _NUM_TRUSTED)
        self.mean_s += (cost_s - self.mean_s) / self._num
        excess_s = cost_s - ALLOWANCE_S * num_tokens
        if excess_s > 0:
            self.tenant.add(excess_s)
        self._add(excess_s)

    def failed(self) -> None:
        """A request ended, as its next mask would have taken more work than there may be. Where
        that happens time and again no other request is to begin."""
        self._add(_FAILURE_S)

    def _add(self, excess_s: float) -> None:
        self.excess_s = max(0.0, self.excess_s + excess_s)
        is_poor = self.tenant.sum_s > MAX_TENANT_EXCESS_S
        self.is_spent |= self.excess_s > (_LEAST_EXCESS_S if is_poor else MAX_EXCESS_S)

    @property
    def is_slow(self) -> bool:
        """Whether its masks are only computed in the time that is set aside for such ones."""
        return self.mean_s > _SLOW_S

    @property
    def is_trusted(self) -> bool:
        """Whether the engine may compute its masks itself, and those of guesses."""
        is_known = self._num == _NUM_TRUSTED and self.mean_s <= _TRUSTED_S
        return is_known and self.tenant.sum_s < _CLEAN_S

    @property
    def error(self) -> str:
        """Why requests with it end."""
        return (
            f"finding the tokens that may come next takes {self.excess_s:.2f} s of CPU time more "
            f"than {1e3 * ALLOWANCE_S:g} ms a token, which is too much: the grammar is ambiguous, "
            "so that a text can be read in very many ways. Write rules so that one text is read in "
            "one way, for example 'list: item+' instead of 'list: list list | item', and parts of "
            "words as one terminal"
        )
