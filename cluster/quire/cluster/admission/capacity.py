"""How many requests the replica groups can begin within a time, learnt from their frames.

A request waits for three things, and begins when it has the last of them:

    prefill  prompt tokens ahead of it           over  prompt tokens computed per second
    a slot   sequences that must end before it   over  sequences that end per second
    blocks   KV that must be let go before it    over  blocks let go per second

A speed counts only over times in which a group had more to do than it could do at once: what it
does otherwise says how much was asked of it. Of a step that computed all there was, what it took
longer than one without prompts counts, where that is the greater part.

How many sequences end per second is the tokens that come out over the mean length of an output, and
that mean counts outputs under way (*censored*: they are at least so long), or else short ones,
which end first, would pass for all of them.

A gateway sees what the others sent only in the groups' frames. Until then it takes each of them to
have sent as much as itself: several then fill the room that all of them see once and not once each,
and one that is alone in having requests fills it too, in as many frames as there are gateways.
"""

from collections.abc import Iterable, Sequence
from math import exp, inf

from quire.router.directory import GroupId
from quire.router.policy import GroupState
from quire.v1 import group_pb2 as pb

_MEMORY_S = 10.0
"""Busy seconds after which an observation counts for a third (1/e) of a new one."""
_MEMORY_OUTPUTS = 100
_PRIOR_S = 0.1
"""So long is a speed assumed that nothing was seen of."""
_PRIOR_MEMORY_S = 1.0
"""Busy seconds after which that counts for a third."""
_PRIOR_PREFILL_PER_S = 16_384.0
_PRIOR_OUTPUT_PER_S = 20.0
"""Per slot."""
_PRIOR_OUTPUT_TOKENS = 128.0
_PRIOR_PROMPT_TOKENS = 1_000.0
"""Of prompts of which nothing is cached."""
_MIN_PER_S = 1e-3


class Capacity:
    """What is known of the groups' speed at one gateway."""

    def __init__(self) -> None:
        self.num_gateways = 1
        """Those that send to the groups, this one counted: the most that any of these says, since
        a group that has just started, or lost some, is attached to by all in a moment."""
        self._groups: dict[GroupId, _GroupPace] = {}
        self._all = _Speeds()  # What a group is taken to do of which nothing was seen.
        self._outputs = _OutputLength()
        self._num_prompt_tokens = self._num_computed_tokens = _PRIOR_PROMPT_TOKENS

    def observe(self, description: pb.GroupDescription, load: pb.Load, *, now_s: float) -> None:
        """Takes in what a group said after a step."""
        group_id = GroupId(description.group_id)
        pace = self._groups.get(group_id)
        if pace is None or pace.epoch != description.epoch:
            pace = self._groups[group_id] = _GroupPace(description, self._all)
            self._count_gateways()
        if pace.num_gateways != load.num_gateways:
            pace.num_gateways = load.num_gateways
            self._count_gateways()
        num_prompt, num_hits = pace.observe(load, now_s)
        if num_prompt > 0:
            kept = exp(-num_prompt / (20 * _PRIOR_PROMPT_TOKENS))
            self._num_prompt_tokens = self._num_prompt_tokens * kept + num_prompt
            self._num_computed_tokens = self._num_computed_tokens * kept + num_prompt - num_hits

    def keep(self, groups: Iterable[GroupId]) -> None:
        """Forgets all groups but these."""
        wanted = set(groups)
        self._groups = {name: pace for name, pace in self._groups.items() if name in wanted}
        self._count_gateways()

    def asked(self, max_tokens: int) -> None:
        """A completion begins that may be ``max_tokens`` long."""
        self._outputs.asked(max_tokens)

    def generated(self, num_tokens: int) -> None:
        """So many more tokens of this gateway's completions came."""
        self._outputs.generated(num_tokens)

    def ended(self, num_completions: int) -> None:
        """So many of them have ended."""
        for _ in range(num_completions):
            self._outputs.ended()

    def num_to_compute(self, num_prompt_tokens: int) -> float:
        """How many tokens of such a prompt are not found in a cache, on average of late."""
        return num_prompt_tokens * self._num_computed_tokens / self._num_prompt_tokens

    def room(
        self,
        states: Sequence[GroupState],
        *,
        wait_s: float,
        tokens_each: float,
        enough: float = inf,
    ) -> float:
        """How many requests beyond those sent could begin within ``wait_s``.

        Each has ``tokens_each`` to compute. Stops counting at ``enough``.
        """
        num_requests = 0.0
        for state in states:
            num_requests += self._room(state, wait_s, max(tokens_each, 1.0))
            if num_requests >= enough:
                break
        return num_requests

    def begun_per_s(self, states: Sequence[GroupState], *, tokens_each: float) -> float:
        """How many requests the groups begin per second when they have enough of them."""
        return sum(
            min(
                speeds.prefill_per_s / max(tokens_each, 1.0),
                speeds.output_per_s / self._outputs.mean,
            )
            for speeds in map(self._speeds, states)
        )

    def _count_gateways(self) -> None:
        self.num_gateways = max((pace.num_gateways for pace in self._groups.values()), default=1)
        self.num_gateways = max(self.num_gateways, 1)  # A group may not say.

    def _room(self, state: GroupState, wait_s: float, tokens_each: float) -> float:
        speeds = self._speeds(state)
        num_reserved = state.num_reserved_requests * self.num_gateways
        ahead = state.num_waiting + num_reserved
        tokens_ahead = state.num_pending_prefill_tokens + (
            state.num_reserved_tokens * self.num_gateways
        )
        # The last one begins when what is before it has been computed; its own tokens come later.
        spare_tokens = speeds.prefill_per_s * wait_s - tokens_ahead
        room = spare_tokens / tokens_each + 1 if spare_tokens >= 0 else 0.0
        if speeds.max_num_seqs is not None:
            num_ending = speeds.output_per_s / self._outputs.mean * wait_s
            room = min(room, speeds.max_num_seqs - state.num_running - ahead + num_ending)
        elif state.num_waiting:
            room = 0.0  # It does not say how many it runs, but it is full.
        if state.num_available_blocks is not None and state.num_running:
            room = min(room, self._room_in_blocks(state, speeds, wait_s, tokens_each))
        if not state.num_requests:
            room = max(room, 1.0)  # Whatever was learnt, an idle group can begin one.
        return max(room, 0.0)

    def _room_in_blocks(
        self, state: GroupState, speeds: "_GroupPace", wait_s: float, tokens_each: float
    ) -> float:
        assert state.num_available_blocks is not None
        num_held = max(0, (state.num_blocks or 0) - state.num_available_blocks)
        num_ending = speeds.short_output_per_s / self._outputs.mean * wait_s
        num_let_go = num_ending * num_held / state.num_running
        num_wanted = state.num_queued_tokens / speeds.block_size + state.num_running
        spare = state.num_available_blocks + num_let_go - num_wanted
        return spare / (tokens_each / speeds.block_size + 1)

    def _speeds(self, state: GroupState) -> "_GroupPace":
        pace = self._groups.get(state.group)
        if pace is None:  # It is there, but has not said anything yet.
            pace = _GroupPace(pb.GroupDescription(), self._all)
        return pace


class _Speeds:
    """Tokens per second, each over the time in which it was the group's limit."""

    def __init__(self) -> None:
        self.prefill = _Rate()
        self.output_when_full = _Rate()  # Every slot is taken.
        self.output_when_short = _Rate()  # Slots are left, and yet requests wait.


class _GroupPace:
    def __init__(self, description: pb.GroupDescription, others: _Speeds) -> None:
        self.epoch = description.epoch
        self.num_gateways = 0
        self.max_num_seqs: int | None = description.max_num_seqs or None
        self.block_size = description.block_size or 1
        self._own = _Speeds()
        self._others = others
        self._decodes = _Rate()  # Steps per second that compute no prompt.
        self._last: tuple[float, pb.Load] | None = None

    @property
    def prefill_per_s(self) -> float:
        prior = self._others.prefill.per_s(_PRIOR_PREFILL_PER_S)
        return self._own.prefill.per_s(prior)

    @property
    def output_per_s(self) -> float:
        if self.max_num_seqs is None:
            return inf
        prior = _PRIOR_OUTPUT_PER_S * self.max_num_seqs
        return self._own.output_when_full.per_s(self._others.output_when_full.per_s(prior))

    @property
    def short_output_per_s(self) -> float:
        prior = _PRIOR_OUTPUT_PER_S * (self.max_num_seqs or 1)
        return self._own.output_when_short.per_s(self._others.output_when_short.per_s(prior))

    def observe(self, load: pb.Load, now_s: float) -> tuple[int, int]:
        """Returns the prompt tokens that were begun since the last time, and the hits in them."""
        last, self._last = self._last, (now_s, load)
        if last is None:
            return 0, 0
        before_s, before = last
        time_s = max(0.0, now_s - before_s)
        num_prompt = load.num_prompt_tokens - before.num_prompt_tokens
        num_hits = load.num_hit_tokens - before.num_hit_tokens
        num_output = load.num_output_tokens - before.num_output_tokens
        if before.num_pending_prefill_tokens:
            # A prompt counts as begun as a whole; what of it is still to come is known exactly
            # where nothing else waits, and evens out over time where something does.
            num_computed = num_prompt - num_hits + _begun(before) - _begun(load)
            if num_computed >= before.num_pending_prefill_tokens:
                time_s = min(time_s, self._prefill_s(num_computed, time_s))
            self._add("prefill", num_computed, time_s)
        elif before.num_running:
            self._decodes.add(1, time_s)
        if self.max_num_seqs is not None and before.num_running >= self.max_num_seqs:
            self._add("output_when_full", num_output, time_s)
        elif before.num_waiting:
            self._add("output_when_short", num_output, time_s)
        return num_prompt, num_hits

    def _prefill_s(self, num_tokens: int, step_s: float) -> float:
        """For how long a step computed prompts that computed all there were: what it took longer
        than one of decodes alone, where that is most of it; else as long as was thought.

        It had room for more: a short prompt alone in a step would pass for a slow group.
        """
        decode_s = 1 / self._decodes.per_s(prior=_MIN_PER_S)
        longer_s = step_s - decode_s if step_s >= 2 * decode_s else 0.0
        return max(longer_s, num_tokens / self.prefill_per_s)

    def _add(self, name: str, amount: float, time_s: float) -> None:
        for speeds in (self._own, self._others):
            getattr(speeds, name).add(amount, time_s)


def _begun(load: pb.Load) -> int:
    """Tokens yet to compute of prompts that were begun."""
    return 0 if load.num_waiting else load.num_pending_prefill_tokens


class _Rate:
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
        return max((self._amount + prior * self._prior_s) / time_s, _MIN_PER_S) if time_s else prior


class _OutputLength:
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
