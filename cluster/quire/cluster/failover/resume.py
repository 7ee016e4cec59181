"""How a completion may go on after its group was lost, and when it may not any more.

No request is blamed for a group that drains, is full, is cut off briefly, or was lost before it
began the attempt. A group that *dies* may have been killed by one of its requests, the poison
request. The first time, all its requests are resumed at once, so that a hundred streams survive one
crash. A request under which ``max_group_deaths - 1`` groups died in a row, without
``isolated_tokens`` in between, is *isolated*: it runs once no group has died for a while, and on a
group without another isolated request. If that group dies too, and no other one at about the same
time, the request is *convicted* and not run again. The completions of one prompt are one request.

A poison request kills again at the same place: at the first token after those that were received,
or a few later if the last ones were lost on the way. An isolated request that gets past that point
is cleared, and the next one runs. So at most ``max_group_deaths`` groups die of one poison request,
and innocent requests are resumed.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quire.cluster.errors import Death, GroupDied, GroupLost, HandedOver
from quire.cluster.links.deaths import Deaths
from quire.worker.api.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """How long a completion looks for a group, and how often completions may go on after losses,
    each and all of a gateway together.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    group_wait_s: float = 60.0
    """How long a completion waits for a group, where all were lost and others start; one that has
    tokens, also where all are full, since its client would lose those tokens."""
    max_attempts: int = 5
    """Attempts of a completion that may be lost before it fails; attempts on draining groups do not
    count."""
    max_group_deaths: int = 3
    isolated_tokens: int = 8
    """Tokens after which an attempt clears its request. A group's death may lose the tokens of one
    step, with steps ahead of two, and those in frames that a slow network held."""
    retry_burst: int = 4096
    """Resumes that a gateway can do at once: as many as it has completions under way
    (`AdmissionConfig.max_inflight`), so that one crash is survived by all, whatever it hit."""
    retry_share: float = 0.2
    """Resumes that each new completion adds, up to that maximum. In the long run resumes are at
    most this share of the traffic: each costs a prefill, and resumes must not overload the
    remaining groups."""
    retry_per_s: float = 10.0
    """Resumes that each second adds, for gateways with little traffic and long streams."""

    def __post_init__(self) -> None:
        for name, least in (("max_attempts", 1), ("max_group_deaths", 2), ("isolated_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be {least} or more")
        for name in ("retry_burst", "retry_share", "retry_per_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more")


class Blame:
    """State shared by the completions of one prompt: the groups that died under any of them."""

    def __init__(self) -> None:
        self.isolated_death: Death | None = None
        """The last one under one of them that was isolated, until it is judged."""
        self.is_convicted = False
        """From then on none of them is run again."""
        self._deaths: list[list[Death]] = []

    @property
    def num_deaths(self) -> int:
        """Groups that died, each counted once, however many of the completions it ran."""
        return len(
            {
                (death.group, death.epoch)
                for deaths in self._deaths
                for death in deaths
                if not death.is_refuted
            }
        )

    def completion(self) -> list[Death]:
        """A list for the deaths of one more completion, for it to keep."""
        self._deaths.append([])
        return self._deaths[-1]

    def judge(self, deaths: Deaths) -> bool:
        """Whether its last death while isolated convicts it now. If not, that counts no more.

        To be called when no group has died for a while: those that died together are then known.
        """
        death, self.isolated_death = self.isolated_death, None
        if death is None:
            return False
        self.is_convicted = deaths.is_alone(death)
        if not self.is_convicted:
            for counted in self._deaths:
                if death in counted:
                    counted.remove(death)
        return self.is_convicted


class Losses:
    """The history of one completion's attempts."""

    def __init__(self, config: CompletionConfig, blame: Blame | None = None) -> None:
        """``blame`` is that of its prompt."""
        self.num_lost = 0
        """Attempts lost, but for those handed over."""
        self.blame = blame or Blame()
        self._config = config
        self._deaths = self.blame.completion()

    @property
    def num_deaths(self) -> int:
        """Groups that died in a row under it, or under others of its prompt."""
        return self.blame.num_deaths

    @property
    def must_be_isolated(self) -> bool:
        return self.num_deaths >= self._config.max_group_deaths - 1

    @property
    def is_hopeless(self) -> bool:
        return self.num_lost >= self._config.max_attempts

    def add(self, error: GroupLost, *, num_tokens: int, is_isolated: bool) -> None:
        """Counts a lost attempt, which had brought ``num_tokens``.

        Only a death while it was isolated can convict it: the completions of one prompt may be on
        several groups that die of something else.
        """
        is_past = num_tokens >= self._config.isolated_tokens
        if is_past:
            # It got past the place where those groups died, so this attempt clears it.
            self._deaths.clear()
        if isinstance(error, HandedOver):
            return
        self.num_lost += 1
        if not isinstance(error, GroupDied):
            return
        self._deaths.append(error.death)
        if is_isolated and not is_past and self.num_deaths >= self._config.max_group_deaths:
            self.blame.isolated_death = error.death


class RetryBudget:
    """A bucket of resumes, filled by traffic and time."""

    def __init__(self, config: CompletionConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._level = float(config.retry_burst)
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """Resumes that could be done now."""
        now_s = self._clock()
        self._add((now_s - self._filled_s) * self._config.retry_per_s)
        self._filled_s = now_s
        return self._level

    def began(self) -> None:
        """A new completion began."""
        self._add(self._config.retry_share)

    def take(self) -> bool:
        """Whether there may be one more resume; if so, it counts."""
        if self.level < 1:
            return False
        self._level -= 1
        return True

    def _add(self, number: float) -> None:
        self._level = min(self._level + number, float(self._config.retry_burst))


class Isolation:
    """The gateway's isolated requests, of which one at a time may be sent to a group."""

    def __init__(self) -> None:
        self.num_completions = 0
        """Those that wait for their turn, and the one that has it."""
        self._turn = asyncio.Lock()

    async def enter(self) -> Callable[[], None]:
        """Waits for a turn, first come, first served; returns how to end it, also twice."""
        self.num_completions += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self.num_completions -= 1
            raise
        is_over = False

        def leave() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.num_completions -= 1
                self._turn.release()

        return leave


class Resumes:
    """Failover state shared by a gateway's completions."""

    def __init__(self, config: CompletionConfig, *, clock: Callable[[], float]) -> None:
        self.config = config
        self.budget = RetryBudget(config, clock=clock)
        self.isolation = Isolation()
