"""Estimates how fast a replica group is, from its frames.

    Speeds     tokens per second while the group is busy, for admission
    StepClock  the completed part of the current step, for routing
    Line       a linear fit of seconds to tokens, for the step clock and forecasts of waits

A speed is measured only while a group has more work than it can do at once. At other times its rate
shows the demand and not the speed. If a step computed all pending prompt tokens, only the time
beyond that of a decode-only step counts, and only if it is the greater part. There is an exception:
requests wait at the gateway although the group has a free slot. Prompts then arrive a few at a
time, with decode-only steps between them, and the whole time of all these steps counts.
"""

from math import exp, inf
from typing import NamedTuple

from quire.router.policies.policy import GroupLoad

_MEMORY_S = 10.0
"""Busy seconds after which an observation counts for a third (1/e) of a new one."""
_PRIOR_S = 0.1
"""The initial speed counts as this many seconds of observation."""
_PRIOR_MEMORY_S = 1.0
"""Busy seconds after which the initial speed counts for a third."""
PRIOR_PREFILL_PER_S = 16_384.0
PRIOR_OUTPUT_PER_S = 20.0
"""Output tokens per second for each slot (a running sequence)."""
MIN_PER_S = 1e-3
MIN_OBSERVATIONS = 8
"""Observations that a `Line` needs before it gives a result."""
_STEPS_KEPT = 30
_DECODES_KEPT = 10_000
"""Many: the number of sequences changes slowly, and the fit needs different ones."""


class Rate:
    """Exponentially decayed amount per second."""

    __slots__ = ("_amount", "_prior_s", "_time_s", "terms")

    def __init__(self) -> None:
        self._amount = self._time_s = 0.0
        self._prior_s = _PRIOR_S
        self.terms = (0.0, _PRIOR_S, _PRIOR_S)
        """``(amount, prior_s, seen_s)``: `per_s` is ``(amount + prior * prior_s) / seen_s``, and
        `MIN_PER_S` at least."""

    def add(self, amount: float, time_s: float) -> None:
        self._prior_s *= exp(-time_s / _PRIOR_MEMORY_S)
        kept = exp(-time_s / _MEMORY_S)
        self._amount = self._amount * kept + amount
        self._time_s = self._time_s * kept + time_s
        seen_s = self._time_s + self._prior_s
        self.terms = (self._amount, self._prior_s, seen_s) if seen_s else (0.0, 1.0, 1.0)

    def per_s(self, prior: float) -> float:
        amount, prior_s, time_s = self.terms
        return max((amount + prior * prior_s) / time_s, MIN_PER_S)


class Rates(NamedTuple):
    """Tokens per second, each measured only while it was the limit."""

    prefill: Rate
    output_when_full: Rate
    """Output tokens while every slot is taken."""
    output_when_short: Rate
    """Output tokens while requests wait although slots are free."""
    steps: "Line"
    """Seconds of a step that computes no prompt, by its sequences."""

    @classmethod
    def new(cls) -> "Rates":
        return cls(Rate(), Rate(), Rate(), Line(window=_DECODES_KEPT))


class Speeds:
    """One group's rates. Its observations also count in ``common``, the rates of all groups."""

    def __init__(self, common: Rates) -> None:
        self.own = Rates.new()
        self._common = common
        self._decodes = Rate()  # Steps per second that compute no prompt.
        self._gap_s = 0.0  # Length of the last step, if decode-only while requests were awaited.
        self._last: tuple[float, GroupLoad] | None = None

    @property
    def prefill_per_s(self) -> float:
        """Prompt tokens that the group computes per second."""
        return self.own.prefill.per_s(self._common.prefill.per_s(PRIOR_PREFILL_PER_S))

    def observe(self, load: GroupLoad, *, at_s: float, is_awaited: bool) -> None:
        """Learns from the group's load after a step. ``is_awaited``: requests wait at the
        gateway."""
        last, self._last = self._last, (at_s, load)
        if last is None:
            return
        before_s, before = last
        time_s = max(0.0, at_s - before_s)
        num_prompt = load.num_prompt_tokens - before.num_prompt_tokens
        num_hits = load.num_hit_tokens - before.num_hit_tokens
        num_output = load.num_output_tokens - before.num_output_tokens
        num_slots = load.max_num_seqs or inf
        # The counters count a whole prompt when it begins. Its uncomputed rest is known exactly
        # if no other request waits; if one does, the error evens out over time.
        num_computed = num_prompt - num_hits + _begun(before) - _begun(load)
        is_fed = is_awaited and 0 < before.num_running < num_slots
        if before.num_pending_prefill_tokens or (is_fed and num_computed > 0):
            if num_computed >= before.num_pending_prefill_tokens:
                time_s = self._prefill_s(num_computed, time_s, is_fed=is_fed)
            self._add("prefill", num_computed, time_s)
            self._gap_s = 0.0
        elif before.num_running and not num_prompt:
            self._decodes.add(1, time_s)
            num_steps = (load.num_steps or 0) - (before.num_steps or 0)
            self._common.steps.add(before.num_running, time_s / max(num_steps, 1))
            self._gap_s = time_s if is_fed else 0.0
        if before.num_running >= num_slots:
            self._add("output_when_full", num_output, time_s)
        elif before.num_waiting:
            self._add("output_when_short", num_output, time_s)

    def _prefill_s(self, num_tokens: int, step_s: float, *, is_fed: bool) -> float:
        """Seconds that a step spent on prompts, if it computed all pending ones.

        If the step took less than twice a decode-only step, this is the expected time. Else it is
        the time beyond a decode-only step; or, while more prompts wait to be sent (``is_fed``), the
        whole time and that of the decode-only step before. The step had spare room, so counting its
        whole time would make a group with one short prompt look slow.
        """
        decode_s = 1 / self._decodes.per_s(prior=MIN_PER_S)
        if step_s < 2 * decode_s:
            return min(step_s, num_tokens / self.prefill_per_s)
        return step_s + self._gap_s if is_fed else step_s - decode_s

    def _add(self, name: str, amount: float, time_s: float) -> None:
        for rates in (self.own, self._common):
            getattr(rates, name).add(amount, time_s)


def _begun(load: GroupLoad) -> int:
    """Uncomputed tokens of prompts that began; taken as 0 while other requests wait."""
    return 0 if load.num_waiting else load.num_pending_prefill_tokens


class StepClock:
    """Estimates a group's progress in its current step, from the arrival times of its frames.

    The length of a step is predicted from its prompt tokens by a `Line` through earlier steps. A
    step is assumed to compute the tokens queued at its start, but at most as many as any earlier
    step. Steps take from 10 ms to several 100 ms. On average half a step is over when the next
    request arrives, and the groups differ much in this.

    Nothing is known before `MIN_OBSERVATIONS` steps, nor about the first step of an idle group: no
    frame marks its start, and a heartbeat may arrive during it.
    """

    __slots__ = (
        "_is_known",
        "_line",
        "_most",
        "_queued",
        "_step",
        "began_s",
        "length_s",
        "num_tokens",
    )

    def __init__(self) -> None:
        self.began_s = 0.0
        """When the last frame of a new step arrived: about the start of the current step."""
        self.length_s = 0.0
        """Expected length of the current step; 0 if unknown."""
        self.num_tokens = 0
        """Prompt tokens that the current step computes."""
        self._most = 0  # The most prompt tokens by which a step has shortened the queue.
        self._step: int | None = None  # Steps that have ended; None before the first frame.
        self._is_known = False  # Whether the current step began at `began_s`.
        self._queued = 0
        self._line = Line(window=_STEPS_KEPT)

    def frame(self, *, step: int, at_s: float, num_queued: int, is_idle: bool) -> None:
        """Learns from a frame: ``step`` steps have ended, ``num_queued`` prompt tokens are left.

        A frame without a new step, such as a heartbeat, is ignored. If several steps ended at once
        and computed prompts, nothing is learned: the tokens of each are unknown.
        """
        num_steps = 1 if self._step is None else step - self._step
        if num_steps <= 0:
            if is_idle:  # All was aborted.
                self._is_known, self.length_s = False, 0.0
            return
        if self._is_known and (num_steps == 1 or not self._queued):
            self._most = max(self._most, self._queued - num_queued)
            self.num_tokens = min(self._queued, self._most)
            self._line.add(self.num_tokens, (at_s - self.began_s) / num_steps)
        self._step = step
        self._is_known = not is_idle
        self._queued = num_queued
        self.num_tokens = min(num_queued, self._most)
        self.began_s = at_s
        self.length_s = 0.0 if is_idle else self._expected_s()

    def _expected_s(self) -> float:
        parts = self._line.parts
        return parts[0] + parts[1] * self.num_tokens if parts else 0.0


class Line:
    """An online linear fit of how long work takes to its number of tokens.

        seconds = fixed + per_token * tokens

    The fit is by least squares over about the last ``window`` observations; neither coefficient is
    negative. Memory is constant.
    """

    __slots__ = ("_kept", "_moments", "_num_seen")

    def __init__(self, *, window: int) -> None:
        """``window``: observations after which one counts for a third (1/e) of a new one."""
        self._kept = 1 - 1 / window
        self._num_seen = 0
        self._moments = (0.0, 0.0, 0.0, 0.0, 0.0)  # Of 1, x, y, x * x, x * y.

    def add(self, num_tokens: float, seconds: float, *, weight: float = 1.0) -> None:
        if not 0 < seconds < inf:
            return  # The clock went back, for example.
        n, x, y, xx, xy = [self._kept * moment for moment in self._moments]
        x_w, y_w = weight * num_tokens, weight * seconds
        self._moments = (
            n + weight,
            x + x_w,
            y + y_w,
            xx + x_w * num_tokens,
            xy + x_w * seconds,
        )
        self._num_seen += 1

    @property
    def parts(self) -> tuple[float, float] | None:
        """``(fixed, per_token)`` in seconds; None before `MIN_OBSERVATIONS`."""
        if self._num_seen < MIN_OBSERVATIONS:
            return None
        n, x, y, xx, xy = self._moments
        spread = n * xx - x * x
        slope = max((n * xy - x * y) / spread, 0.0) if spread > 1e-6 * n * xx else 0.0
        fixed = (y - slope * x) / n
        # A negative fixed part is replaced by a fit through the origin.
        return (fixed, slope) if fixed >= 0 else (0.0, xy / xx)
