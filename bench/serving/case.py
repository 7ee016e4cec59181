"""One run: a cluster to start, and a load to put on it. It is stored with its figures."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.router.config import POLICY_NAMES
from quire.worker.request.errors import ConfigError

LOOPS = ("closed", "open")
"""Chats whose next turn follows the answer, or requests at predetermined times."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table, of which there is one run in each round.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    policy: str
    num_groups: int = 2
    num_gateways: int = 1
    use_directory: bool = True
    lose_batches: float = 0.0
    lose_events: float = 0.0
    model: str = "S"
    num_blocks: int = 1500
    """Blocks in each group's cache."""
    loop: str = "closed"
    """One of `LOOPS`."""
    num_users: int = 16
    """Users of a closed loop."""
    chats_per_s: float = 10.0
    """Arrival rate of an open loop."""
    limit_s: float = 60.0
    """Seconds after which unfinished requests are cancelled."""
    num_tenants: int = 40
    num_chats: int = 120
    think_s: float = 0.3
    """Mean pause before each turn, in seconds."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            known = ", ".join(POLICY_NAMES)
            raise ConfigError(f"policy={self.policy!r}: must be one of {known}")
        for name in ("lose_batches", "lose_events"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be from 0 to 1")
        for name in ("num_users", "chats_per_s", "limit_s", "num_tenants", "num_chats"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above 0")

    @property
    def label(self) -> str:
        """Policy and trouble, without what the tables' titles say."""
        parts = [self.policy]
        if not self.use_directory:
            parts.append("no directory")
        if self.lose_batches:
            parts.append(f"{self.lose_batches:.0%} of messages lost")
        if self.lose_events:
            parts.append(f"{self.lose_events:.0%} of events lost")
        if self.num_gateways > 1:
            parts.append(f"{self.num_gateways} gateways")
        return ", ".join(parts)

    @property
    def title(self) -> str:
        """Settings that cases must share to be compared."""
        users, rate = (
            f"closed loop of {self.num_users} users",
            f"open loop at {self.chats_per_s:g}/s",
        )
        return (
            f"{self.num_chats} chats of {self.num_tenants} tenants, "
            f"{users if self.loop == 'closed' else rate}; {self.num_groups} groups of "
            f"{self.num_blocks} blocks, model {self.model}"
        )


def cases(specs: Sequence[str], **common: Any) -> list[Case]:
    """One for each of ``specs``, which is a policy, or a policy and what is different for it:
    ``prefix_aware:lose_events=0.1,num_gateways=4``, ``prefix_aware:use_directory=0``.

    Raises:
        ConfigError: A spec names no policy or setting, or its value cannot work.
    """
    return [Case(**{**common, **_settings_of(spec)}) for spec in specs]


def in_turn(rounds: Iterable[int], cases: Sequence[Case]) -> list[tuple[int, Case]]:
    """Round by round; odd ones go from the last case to the first."""
    return [(number, case) for number in rounds for case in cases[:: -1 if number % 2 else 1]]


_KINDS: dict[str, Callable[[str], Any]] = {
    "num_gateways": int,
    "use_directory": lambda value: bool(int(value)),
    "lose_batches": float,
    "lose_events": float,
}


def _settings_of(spec: str) -> dict[str, Any]:
    policy, _, settings = spec.partition(":")
    found: dict[str, Any] = {"policy": policy}
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        try:
            found[name] = _KINDS[name](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{spec!r}: {setting!r} is none of {', '.join(_KINDS)} with =NUMBER behind it"
            ) from None
    return found
