"""How fast the replica groups are, learnt from their frames, and how long outputs are.

A speed is measured only while a group has more work than it can do at once; at other times its rate
shows the demand and not the speed. If a step computed all pending prompt tokens, only the time
beyond that of a step without prompts counts, and only if it is the greater part. While requests
wait at the gateway, though the group has a free slot, its prompts are sent a few at a time, and
steps without any lie between: then the whole time counts, of these steps too.

Sequences that end per second are output tokens per second over the mean output length. That mean
includes outputs under way as *censored* observations (they are at least that long); otherwise short
outputs, which end first, would be taken for all.
"""

from math import exp, inf

from quire.v1 import group_pb2 as pb

_MEMORY_S = 10.0
"""Busy seconds after which an observation counts for a third (1/e) of a new one."""
_MEMORY_OUTPUTS = 100
_PRIOR_S = 0.1
"""The initial speed counts as this many seconds of observation."""
_PRIOR_MEMORY_S = 1.0
"""Busy seconds after which the initial speed counts for a third."""
PRIOR_PREFILL_PER_S = 16_384.0
PRIOR_OUTPUT_PER_S = 20.0
"""Per slot."""
_PRIOR_OUTPUT_TOKENS = 128.0
MIN_PER_S = 1e-3


class Speeds:
    """Rates in tokens per second, each over the time in which it was the group's limit."""

    def __init__(self) -> None:
        self.prefill = Rate()
        self.output_when_full = Rate()  # Every slot is taken.
        self.output_when_short = Rate()  # Slots are left, and yet requests wait.

    def terms(self) -> tuple[tuple[float, ...], ...]:
        """`Rate.terms` of the three rates, in this order: the first ones, the second, the third."""
        full, short = self.output_when_full.terms(), self.output_when_short.terms()
        return tuple(zip(self.prefill.terms(), full, short, strict=True))


class GroupPace:
    """One group's speeds; with few observations, those of ``others``."""

    def __init__(self, description: pb.GroupDescription, others: Speeds) -> None:
        self.epoch = description.epoch
        self.num_gateways = 0
        self.max_num_seqs: int | None = description.max_num_seqs or None
        self.block_size = description.block_size or 1
        self.own = Speeds()
        self._others = others
        self._decodes = Rate()  # Steps per second that compute no prompt.
        self._gap_s = 0.0  # How long the last step took, if it computed none that were awaited.
        self._last: tuple[float, pb.Load] | None = None

    @property
    def prefill_per_s(self) -> float:
        prior = self._others.prefill.per_s(PRIOR_PREFILL_PER_S)
        return self.own.prefill.per_s(prior)

    def observe(self, load: pb.Load, now_s: float, *, is_awaited: bool = False) -> None:
        """Takes in the group's load after a step. ``is_awaited``: requests wait at the gateway."""
        last, self._last = self._last, (now_s, load)
        if last is None:
            return
        before_s, before = last
        time_s = max(0.0, now_s - before_s)
        num_prompt = load.num_prompt_tokens - before.num_prompt_tokens
        num_hits = load.num_hit_tokens - before.num_hit_tokens
        num_output = load.num_output_tokens - before.num_output_tokens
        # A prompt counts as begun as a whole; what of it is still to come is known exactly
        # where nothing else waits, and evens out over time where something does.
        num_computed = num_prompt - num_hits + _begun(before) - _begun(load)
        is_fed = is_awaited and 0 < before.num_running < (self.max_num_seqs or inf)
        if before.num_pending_prefill_tokens or (is_fed and num_computed > 0):
            if num_computed >= before.num_pending_prefill_tokens:
                time_s = self._prefill_s(num_computed, time_s, is_fed=is_fed)
            self._add("prefill", num_computed, time_s)
            self._gap_s = 0.0
        elif before.num_running and not num_prompt:
            self._decodes.add(1, time_s)
            self._gap_s = time_s if is_fed else 0.0
        if self.max_num_seqs is not None and before.num_running >= self.max_num_seqs:
            self._add("output_when_full", num_output, time_s)
        elif before.num_waiting:
            self._add("output_when_short", num_output, time_s)

    def _prefill_s(self, num_tokens: int, step_s: float, *, is_fed: bool) -> float:
        """Seconds that a step spent on prompts, if it computed all pending ones. If most of it is
        the time beyond that of a decode-only step: that time, or all of it and of the decodes
        before it while more wait to be sent. Else the expected time.

        Such a step had spare room, so its whole time would make a short prompt alone look like a
        slow group.
        """
        decode_s = 1 / self._decodes.per_s(prior=MIN_PER_S)
        if step_s < 2 * decode_s:
            return min(step_s, num_tokens / self.prefill_per_s)
        return step_s + self._gap_s if is_fed else step_s - decode_s

    def _add(self, name: str, amount: float, time_s: float) -> None:
        for speeds in (self.own, self._others):
            getattr(speeds, name).add(amount, time_s)


def _begun(load: pb.Load) -> int:
    """Tokens yet to compute of prompts that were begun."""
    return 0 if load.num_waiting else load.num_pending_prefill_tokens


class Rate:
    """Exponentially decayed amount per second."""

    def __init__(self) -> None:
        self._amount = self._time_s = 0.0
        self._prior_s = _PRIOR_S

    def add(self, amount: float, time_s: float) -> None:
        self._prior_s *= exp(-time_s / _PRIOR_MEMORY_S)
        kept = exp(-time_s / _MEMORY_S)
        self._amount = self._amount * kept + amount
        self._time_s = self._time_s * kept + time_s

    def per_s(self, prior: float) -> float:
        time_s = self._time_s + self._prior_s
        return max((self._amount + prior * self._prior_s) / time_s, MIN_PER_S) if time_s else prior

    def terms(self) -> tuple[float, float, float]:
        """Three numbers, of which `per_s` is the first and the prior times the second, together
        over the third, and `MIN_PER_S` at least."""
        time_s = self._time_s + self._prior_s
        return (self._amount, self._prior_s, time_s) if time_s else (0.0, 1.0, 1.0)


class OutputLength:
    """The mean length of an output: tokens seen over ends seen, which is the most likely mean of
    an exponential distribution from a sample that is partly under way; at most what was asked."""

    def __init__(self) -> None:
        self._num_tokens = _PRIOR_OUTPUT_TOKENS
        self._num_ends = 1.0
        self._num_allowed = self._num_asked = 0.0

    @property
    def mean(self) -> float:
        mean = max(self._num_tokens / self._num_ends, 1.0)
        return min(mean, self._num_allowed / self._num_asked) if self._num_asked else mean

    def asked(self, max_tokens: int) -> None:
        kept = 1 - 1 / _MEMORY_OUTPUTS
        self._num_allowed = self._num_allowed * kept + max_tokens
        self._num_asked = self._num_asked * kept + 1

    def generated(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def ended(self) -> None:
        kept = 1 - 1 / _MEMORY_OUTPUTS
        self._num_tokens *= kept
        self._num_ends = self._num_ends * kept + 1
