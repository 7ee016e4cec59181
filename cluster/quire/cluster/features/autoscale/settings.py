"""Settings of autoscaling, and how often groups report to Ray Serve."""

from dataclasses import dataclass
from math import inf

from quire.worker.request.errors import ConfigError

METRICS_INTERVAL_S = 1.0
"""Seconds between a group's reports."""
LOOK_BACK_S = 6.0
"""Seconds for which Serve keeps reports."""


@dataclass(frozen=True, kw_only=True)
class AutoscalingSettings:
    """When groups are started and stopped.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    min_groups: int = 1
    """The fewest groups. 0 stops the last group too; new requests then wait until one runs."""
    max_groups: int = 1
    """The most groups that may run at a time."""
    target_ttft_s: float = 2.0
    """How long prompts should wait for their turn at most."""
    max_kv_use: float = 0.8
    """The share of KV blocks that running requests may hold, over all groups."""
    max_busy: float = 0.85
    """The share of the groups' prefill speed that arriving prompts may take."""
    recover_s: float = 10.0
    """How soon after a group's start a backlog beyond the target should be gone. A shorter time
    starts more groups."""
    down_use: float = 0.7
    """A group is superfluous when the others would stay within this share of every limit."""
    down_delay_s: float = 120.0
    """A group must be superfluous for this time, without a break, before it is stopped."""
    down_step_s: float = 15.0
    """Seconds between stopping one group and the next."""
    idle_delay_s: float = 600.0
    """Seconds without any work before the last group is stopped."""
    start_wait_s: float = 120.0
    """How long requests wait for the first group to start, if there may be none."""

    def __post_init__(self) -> None:
        if self.min_groups < 0:
            raise ConfigError(f"min_groups={self.min_groups!r}: must be 0 or more")
        if self.max_groups < max(self.min_groups, 1):
            raise ConfigError(
                f"max_groups={self.max_groups!r}: must be 1 or more, and not below "
                f"min_groups={self.min_groups!r}"
            )
        # Written so that NaN fails the comparison.
        for name in ("target_ttft_s", "recover_s", "start_wait_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        for name in ("max_kv_use", "max_busy", "down_use"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: must be a share above 0 and up to 1"
                )
        for name in ("down_delay_s", "down_step_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more")
        # Reports that Serve still keeps would start the group again that was just stopped.
        if not self.idle_delay_s >= LOOK_BACK_S + 2 * METRICS_INTERVAL_S:
            raise ConfigError(
                f"idle_delay_s={self.idle_delay_s!r}: must be "
                f"{LOOK_BACK_S + 2 * METRICS_INTERVAL_S:g} or more"
            )


@dataclass(frozen=True, kw_only=True)
class GatewayAutoscaling:
    """When gateways are started and stopped.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    min_gateways: int = 1
    """The fewest gateways; a cluster starts with this number."""
    max_gateways: int
    """The most gateways that may run at a time."""
    target_inflight: int = 512
    """The most completions that should be in progress at each gateway."""
    down_delay_s: float = 300.0
    """How long fewer gateways must have been enough before one stops."""

    def __post_init__(self) -> None:
        if self.min_gateways < 1:
            raise ConfigError(f"min_gateways={self.min_gateways!r}: must be 1 or more")
        if self.max_gateways < self.min_gateways:
            raise ConfigError(
                f"max_gateways={self.max_gateways!r}: must not be below "
                f"min_gateways={self.min_gateways!r}"
            )
        if self.target_inflight < 1:
            raise ConfigError(f"target_inflight={self.target_inflight!r}: must be 1 or more")
        if not 0 <= self.down_delay_s < inf:
            raise ConfigError(
                f"down_delay_s={self.down_delay_s!r}: must be 0 or more seconds, and finite"
            )
