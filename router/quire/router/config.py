"""Settings of routing, checked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quire.worker.request.errors import ConfigError

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
class RoutingConfig:
    """How a process routes.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    policy: str = "prefix_aware"
    """One of `POLICY_NAMES`."""
    use_directory: bool = True
    """If off, the router follows no block events and knows nothing of caches: load decides, and
    ties are broken by the name of the prompt's first block."""
    num_prefill_groups: int = 0
    """How many of the groups only compute prompts and hand each stream over with its KV after its
    first token. With 0, or if no other group is left, each group does both."""
    stale_after_s: float = 30.0
    """If a group sends no events for longer, only its load counts in routing."""
    reservation_timeout_s: float = 60.0
    """A reservation that a group's frames have not shown after this time is dropped. So is a call
    through a handle, whose end may never be reported."""
    max_directory_blocks: int = 4_000_000
    """Distinct blocks in the directory, of some 20 bytes each (100 where there is no compiler)."""
    max_in_flight: int = 65_536
    """Requests under way that are remembered; past that the oldest is dropped, as if it had
    ended."""
    max_in_flight_blocks: int = 1_000_000
    """Blocks of in-flight prefixes; past that a request's prefix is not counted as cached."""
    max_decisions_kept: int = 1024
    """Decisions whose explanation is kept, the newest ones; 0 keeps none."""
    max_candidates_kept: int = 32_768
    """Candidates of all those decisions, of some 400 bytes each: with hundreds of groups fewer
    decisions are kept. The last one always is."""

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"policy={self.policy!r}: must be one of {', '.join(POLICY_NAMES)}")
        for name in (
            "stale_after_s",
            "reservation_timeout_s",
            "max_directory_blocks",
            "max_in_flight",
            "max_in_flight_blocks",
        ):
            if not getattr(self, name) > 0:  # Nor is what is not a number.
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        for name in ("num_prefill_groups", "max_decisions_kept", "max_candidates_kept"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more")
