"""Settings of autoscaling, and how often groups report to Ray Serve."""

from dataclasses import dataclass

from quire.worker.request.settings import Branch, setting

METRICS_INTERVAL_S = 1.0
"""Seconds between a group's reports."""
LOOK_BACK_S = 6.0
"""Seconds for which Serve keeps reports."""


@dataclass(frozen=True, kw_only=True)
class AutoscalingSettings(Branch):
    """When groups are started and stopped.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    title = "replica groups"

    min_groups: int = 1
    """The fewest groups. 0 stops the last group too; new requests then wait until one runs."""
    max_groups: int = 1
    """The most groups that may run at a time. Its flag turns autoscaling on."""
    target_ttft_s: float = 2.0
    """How long prompts should wait for their turn at most."""
    max_kv_use: float = setting(0.8, flag=None)
    """The share of KV blocks that running requests may hold, over all groups."""
    max_busy: float = setting(0.85, flag=None)
    """The share of the groups' prefill speed that arriving prompts may take."""
    recover_s: float = setting(10.0, flag=None)
    """How soon after a group's start a backlog beyond the target should be gone. A shorter time
    starts more groups."""
    down_use: float = setting(0.7, flag=None)
    """A group is superfluous when the others would stay within this share of every limit."""
    down_delay_s: float = setting(120.0, flag=None)
    """A group must be superfluous for this time, without a break, before it is stopped."""
    down_step_s: float = setting(15.0, flag=None)
    """Seconds between stopping one group and the next."""
    idle_delay_s: float = setting(600.0, flag=None)
    """Seconds without any work before the last group is stopped."""
    start_wait_s: float = setting(120.0, flag=None)
    """How long requests wait for the first group to start, if there may be none."""

    def _check(self) -> None:
        self._must_be_at_least(0, "min_groups")
        self._must(
            self.max_groups >= max(self.min_groups, 1),
            "max_groups",
            f"must be 1 or more, and not below min_groups={self.min_groups!r}",
        )
        # Written so that NaN fails the comparison.
        for name in ("target_ttft_s", "recover_s", "start_wait_s"):
            self._must(getattr(self, name) > 0, name, "must be above 0")
        for name in ("max_kv_use", "max_busy", "down_use"):
            self._must(0 < getattr(self, name) <= 1, name, "must be a share above 0 and up to 1")
        self._must_be_at_least(0, "down_delay_s", "down_step_s")
        # Reports that Serve still keeps would start the group again that was just stopped.
        least_s = LOOK_BACK_S + 2 * METRICS_INTERVAL_S
        self._must(self.idle_delay_s >= least_s, "idle_delay_s", f"must be {least_s:g} or more")


@dataclass(frozen=True, kw_only=True)
class GatewayAutoscaling(Branch):
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

    def _check(self) -> None:
        self._must_be_at_least(1, "min_gateways", "target_inflight")
        self._must(
            self.max_gateways >= self.min_gateways,
            "max_gateways",
            f"must not be below min_gateways={self.min_gateways!r}",
        )
        self._must_be_finite("down_delay_s")
