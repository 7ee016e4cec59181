"""Decides whether a completion may continue after its group was lost.

No request is blamed for a group that drains, is full, is cut off briefly, or was lost before it
began the attempt. A group that *dies* may have been killed by one of its requests, the poison
request. The first time, all its requests are resumed at once, so that a hundred streams survive one
crash. A request under which ``max_group_deaths - 1`` groups died in a row, without
``isolated_tokens`` in between, is *isolated*: it runs once no group has died for a while, and on a
group without another isolated request. If that group dies too, and no other one at about the same
time, the request is *convicted* and not run again. The completions of one prompt are one request.

A poison request kills again at the same place: at the first token after those that were received,
or a few later if the last tokens were lost in transit. An isolated request that gets past that
point is cleared, and the next one runs. So at most ``max_group_deaths`` groups die of one poison
request, and innocent requests are resumed. Poison requests of several gateways may kill groups
together each time, which convicts none of them: each ends after ``max_attempts`` lost attempts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from quire.cluster.errors import Death, GroupDied, GroupLost, HandedOver
from quire.cluster.links.deaths import Deaths
from quire.worker.request.settings import Branch


@dataclass(frozen=True, kw_only=True)
class FailoverSettings(Branch):
    """What an operator may set of `CompletionConfig`."""

    title = "failover and shutdown"

    group_wait_s: float = 60.0
    """How long requests and streams wait for a new group after all groups were lost. Set it longer
    than a group takes to start. If autoscaling may stop the last group,
    ``autoscaling.start_wait_s`` is used instead."""
    max_group_deaths: int = 3
    """A request is refused after this many groups in a row died while they ran it."""

    def _check(self) -> None:
        self._must_be_finite("group_wait_s")
        self._must(
            self.max_group_deaths >= 2,
            "max_group_deaths",
            "must be 2 or more, since 1 would refuse every request whose group dies",
        )


@dataclass(frozen=True, kw_only=True)
class CompletionConfig(FailoverSettings):
    """How long a completion looks for a group, and how often completions may be resumed, each alone
    and all of a gateway together.

    A completion with tokens waits for ``group_wait_s`` also for a full group, because its client
    would lose those tokens.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    max_attempts: int = 5
    """Attempts of a completion that may be lost before it fails; attempts on draining groups do not
    count."""
    isolated_tokens: int = 8
    """Tokens after which an attempt clears its request. A group's death may lose the tokens of one
    step (of two, if steps are prepared ahead) and those in frames that a slow network held."""
    retry_burst: int = 4096
    """Most resumes that a gateway can do at once: as many as it may have completions in progress
    (`AdmissionConfig.max_inflight`), so that all of them survive a crash."""
    retry_share: float = 0.2
    """Resumes that each new completion adds to the budget, up to ``retry_burst``. In the long run
    resumes are at most this share of the traffic: each costs a prefill, and resumes must not
    overload the remaining groups."""
    retry_per_s: float = 10.0
    """Resumes that each second adds to the budget, for gateways with little traffic and long
    streams."""

    def _check(self) -> None:
        self._must_be_at_least(1, "max_attempts", "isolated_tokens")
        self._must_be_at_least(0, "retry_burst", "retry_share", "retry_per_s")


class Blame:
    """State shared by the completions of one prompt: the groups that died under any of them."""

    def __init__(self) -> None:
        self.isolated_death: Death | None = None
        """The last death under an isolated completion of the prompt, until `judge` is called."""
        self.is_convicted = False
        """Whether the request is convicted: no completion of the prompt runs again."""
        self._deaths: list[list[Death]] = []

    @property
    def num_deaths(self) -> int:
        """Number of groups that died, each counted once, however many completions it ran."""
        return len(
            {
                (death.group, death.epoch)
                for deaths in self._deaths
                for death in deaths
                if not death.is_refuted
            }
        )

    def completion(self) -> list[Death]:
        """Adds a completion; returns the list to which it adds the deaths under it."""
        self._deaths.append([])
        return self._deaths[-1]

    def judge(self, deaths: Deaths) -> bool:
        """Whether the last death under the isolated request convicts it. If not, that death is no
        longer counted.

        Call it when no group has died for a while: all groups that died together are then known.
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
        """``blame`` is shared by the completions of the prompt."""
        self.num_lost = 0
        """Number of lost attempts, without those that were handed over."""
        self.blame = blame or Blame()
        self._config = config
        self._deaths = self.blame.completion()

    @property
    def num_deaths(self) -> int:
        """Number of groups that died in a row under the completions of the prompt."""
        return self.blame.num_deaths

    @property
    def must_be_isolated(self) -> bool:
        return self.num_deaths >= self._config.max_group_deaths - 1

    @property
    def is_hopeless(self) -> bool:
        return self.num_lost >= self._config.max_attempts

    def add(self, error: GroupLost, *, num_tokens: int, is_isolated: bool) -> None:
        """Counts a lost attempt that had generated ``num_tokens``.

        Only a death while the completion was isolated can convict its request: the completions of
        one prompt may be on several groups that die of something else.
        """
        is_past = num_tokens >= self._config.isolated_tokens
        if is_past:
            # The attempt got past the token at which those groups died, which clears the request.
            self._deaths.clear()
        if isinstance(error, HandedOver):
            return
        self.num_lost += 1
        if not isinstance(error, GroupDied):
            return
        self._deaths.append(error.death)
        if is_isolated and not is_past and self.num_deaths >= self._config.max_group_deaths:
            self.blame.isolated_death = error.death


def losses_of_prompt(config: CompletionConfig, num_completions: int) -> list[Losses]:
    """The losses of each completion of one prompt, which are blamed as one request."""
    blame = Blame()
    return [Losses(config, blame) for _ in range(num_completions)]


class RetryBudget:
    """A token bucket of resumes, filled by new completions and by time."""

    def __init__(self, config: CompletionConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._level = float(config.retry_burst)
        self._filled_s = clock()

    @property
    def level(self) -> float:
        """Number of resumes that are allowed now."""
        now_s = self._clock()
        self._add((now_s - self._filled_s) * self._config.retry_per_s)
        self._filled_s = now_s
        return self._level

    def began(self) -> None:
        """Counts a new completion, which adds `CompletionConfig.retry_share`."""
        self._add(self._config.retry_share)

    def take(self) -> bool:
        """Takes one resume from the budget; returns whether there was one."""
        if self.level < 1:
            return False
        self._level -= 1
        return True

    def _add(self, number: float) -> None:
        self._level = min(self._level + number, float(self._config.retry_burst))


class Isolation:
    """The turns of a gateway's isolated completions: one at a time may be sent to a group."""

    def __init__(self) -> None:
        self.num_completions = 0
        """Completions that wait for their turn or have it."""
        self._turn = asyncio.Lock()

    async def enter(self) -> Callable[[], None]:
        """Waits for a turn, first come, first served; returns a function that ends it, which may be
        called repeatedly."""
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
