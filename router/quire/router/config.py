"""Settings of routing, checked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.worker.request.settings import Branch, setting

POLICY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "prefix_aware": "least predicted time to first token, for this request and those after it",
        "round_robin": "the groups in turn",
        "least_loaded": "the least work queued and running",
        "power_of_two": "the one with fewer requests of two at random, as Ray Serve does",
    }
)
"""The policies of `quire.router.policies.catalog`, each in a line."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig(Branch):
    """How a process routes.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    title = "routing"
    about = "How a group is chosen for a request."

    policy: str = setting(
        "prefix_aware", flag="routing-policy", metavar="POLICY", choices=POLICY_NAMES
    )
    """How a group is chosen."""
    use_directory: bool = setting(True, flag="directory")
    """Follow the groups' cache events. If off, the router knows nothing of caches: load decides,
    and ties are broken by the name of the prompt's first block."""
    num_prefill_groups: int = setting(0, flag="prefill-groups", metavar="N")
    """How many of the groups only compute prompts and hand each stream over with its KV after its
    first token. With 0, or if no other group is left, each group does both."""
    stale_after_s: float = setting(30.0, flag=None)
    """If a group sends no events for longer, only its load counts in routing."""
    reservation_timeout_s: float = setting(60.0, flag=None)
    """A reservation that a group's frames have not shown after this time is dropped. So is a call
    through a handle, whose end may never be reported."""
    max_directory_blocks: int = setting(4_000_000, flag=None)
    """Distinct blocks in the directory, of some 20 bytes each (100 where there is no compiler)."""
    max_in_flight: int = setting(65_536, flag=None)
    """Requests under way that are remembered; past that the oldest is dropped, as if it had
    ended."""
    max_in_flight_blocks: int = setting(1_000_000, flag=None)
    """Blocks of in-flight prefixes; past that a request's prefix is not counted as cached."""
    max_decisions_kept: int = setting(1024, flag=None)
    """Decisions whose explanation is kept, the newest ones; 0 keeps none."""
    max_candidates_kept: int = setting(32_768, flag=None)
    """Candidates of all those decisions, of some 400 bytes each: with hundreds of groups fewer
    decisions are kept. The last one always is."""

    def _check(self) -> None:
        names = ", ".join(POLICY_NAMES)
        self._must(self.policy in POLICY_NAMES, "policy", f"must be one of {names}")
        for name in (
            *("stale_after_s", "reservation_timeout_s", "max_directory_blocks"),
            *("max_in_flight", "max_in_flight_blocks"),
        ):
            self._must(getattr(self, name) > 0, name, "must be above 0")  # Refuses NaN too.
        self._must_be_at_least(0, "num_prefill_groups", "max_decisions_kept", "max_candidates_kept")
