"""Decides how many replica groups there should be. Ray Serve chooses which ones to stop.

`decide` is a function of the groups' samples, of its last state and of the time. It scales up at
once by as many groups as are needed. It scales down by one group at a time, after fewer have been
enough for ``down_delay_s``. It does not scale down while a running group is silent, because a hung
group and an idle one look alike.

The need (`_need`) is the largest of four numbers of groups: for arriving prompt tokens and for
waiting ones, both at the measured speed; for KV cache; for sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf

from quire.cluster.features.autoscale.settings import METRICS_INTERVAL_S, AutoscalingSettings

STALE_S = 5.0
"""A group whose last sample is older counts as silent."""
_MIN_FULL_S = 0.2
"""Least seconds of full steps in the window to measure a speed: one or two steps say little."""
_SPEED_KEPT = 0.7
"""Share of the known speed that is kept at each new measurement."""
_SMOOTHED_S = 30.0
"""Arrivals are averaged over this time; over a short window they vary by chance."""
_NOTHING = 0.01
"""Share of one group that counts as no demand: a fading average never reaches zero."""
_MAX_PATIENCE = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A group's report at one time: numbers of its `EngineStats`, which Serve passes on as floats,
    and two more, ``max_num_seqs`` and ``kv_use``."""

    time_s: float
    num_pending_prefill_tokens: float = 0
    num_prefilled_tokens: float = 0
    num_full_step_tokens: float = 0
    full_step_s: float = 0.0
    num_running: float = 0
    num_waiting: float = 0
    max_num_seqs: float = 1
    kv_use: float = 0.0
    """The share of KV blocks that running requests hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The input of a decision."""

    num_groups: int
    """Current target: the groups that run and those that start."""
    groups: Sequence[Sequence[Sample]]
    """Latest samples of each running group, oldest first; empty for a group without any yet."""
    num_gateway_tokens: int = 0
    """Prompt tokens of requests that wait at gateways because no group can take them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """State kept between decisions. Its size is bounded by ``max_groups``."""

    speed: float | None = None
    """Prompt tokens per second that a group computes while prompts wait. ``None`` until prompts
    have waited; until then prompts require no group."""
    usual_arrival_rate: float = 0.0
    """Prompt tokens per second that arrive at all groups and are not cached, smoothed."""
    learnt_s: float = -inf
    """Time of the newest sample in ``speed`` and ``usual_arrival_rate``."""
    start_s: float = 0.0
    """How long the last groups took to start, or starting ones have taken so far."""
    asked_s: float | None = None
    """When the starting groups were requested; ``None`` if none starts."""
    last_needed_s: tuple[float, ...] = ()
    """When at least one group was last needed, at least two, and so on up to ``max_groups``."""
    last_down_s: float = -inf
    patience: float = 1.0
    """Factor on ``down_delay_s``, which grows when scaling down proved to be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingDecision:
    num_groups: int
    reason: str
    """The need that requires the most groups: "demand", "burst", "prefill", "backlog", "kv",
    "sequences" or "none"; or "unheard" if a group is silent."""
    predicted_wait_s: float | None
    """Predicted wait of a prompt that arrives now at the running groups; ``None`` without a speed
    or a group."""


def decide(
    observation: Observation, state: State, now_s: float, settings: AutoscalingSettings
) -> tuple[ScalingDecision, State]:
    """The number of groups that there should be from now on, and the state for the next call."""
    state = _learn_start(observation, _learn(observation, state), now_s)
    need, reason = _need(observation, state, settings)
    enough = max(need, _need(observation, state, settings, going_down=True)[0])
    current = observation.num_groups
    if any(not group or now_s - group[-1].time_s > STALE_S for group in observation.groups):
        enough = max(enough, current)
        if need <= current:
            reason = "unheard"
    before = state.last_needed_s or (now_s,) * settings.max_groups
    state = replace(
        state,
        last_needed_s=tuple(
            now_s if number <= enough else last_s for number, last_s in enumerate(before, 1)
        ),
    )
    target = _bounded(need, settings)
    if target < current:
        target, state = _one_less(current, state, now_s, settings)
    elif target > current:
        state = replace(
            state, patience=_patience(state, now_s, settings), asked_s=state.asked_s or now_s
        )
    wait_s = _predicted_wait_s(observation, state.speed)
    return ScalingDecision(num_groups=target, reason=reason, predicted_wait_s=wait_s), state


def _one_less(
    current: int, state: State, now_s: float, settings: AutoscalingSettings
) -> tuple[int, State]:
    """One group fewer if the delays have passed, else the current number."""
    if current > settings.max_groups:
        return settings.max_groups, state
    spare_s = now_s - state.last_needed_s[current - 1]
    if current == 1:
        is_time = spare_s >= settings.idle_delay_s
    else:
        # The longer delay is meant for a load between two numbers of groups, not for a clearly
        # lower one.
        two_spare_s = now_s - state.last_needed_s[current - 2]
        is_time = spare_s >= state.patience * settings.down_delay_s
        is_time = is_time or two_spare_s >= settings.down_delay_s
    if not is_time or now_s - state.last_down_s < settings.down_step_s:
        return current, state
    return current - 1, replace(state, last_down_s=now_s)


def _patience(state: State, now_s: float, settings: AutoscalingSettings) -> float:
    """The patience after scaling up: doubled if the last scaling down was recent, and so wrong."""
    since_down_s = now_s - state.last_down_s
    if since_down_s <= state.patience * settings.down_delay_s:
        return min(2 * state.patience, _MAX_PATIENCE)
    return state.patience if since_down_s <= _MAX_PATIENCE * settings.down_delay_s else 1.0


def _need(
    observation: Observation,
    state: State,
    settings: AutoscalingSettings,
    *,
    going_down: bool = False,
) -> tuple[int, str]:
    """The number of groups needed to stay within every limit, and the reason. With ``going_down``,
    within the share ``down_use`` of every limit."""
    use = settings.down_use if going_down else 1.0
    latest = [group[-1] for group in observation.groups if group]
    pending = num_pending(observation)
    arriving = sum(_arrival_rate(group) for group in observation.groups)
    # A request that arrives between two samples also needs a group.
    needs = {"none": 0.0, "demand": float(bool(observation.num_gateway_tokens or arriving))}
    if latest:
        num_sequences = sum(sample.num_running + sample.num_waiting for sample in latest)
        needs["sequences"] = num_sequences / (use * latest[0].max_num_seqs)
        needs["kv"] = sum(sample.kv_use for sample in latest) / (use * settings.max_kv_use)
    if state.speed is not None:
        capacity = state.speed * settings.max_busy * use
        usual = state.usual_arrival_rate / capacity
        needs["prefill"] = usual if usual > _NOTHING else 0.0
        allowed = state.speed * settings.target_ttft_s * max(observation.num_groups, 1) * use
        if pending > allowed / 2 and not going_down:
            # Arrivals of a few seconds vary by chance, so they only count when prompts wait.
            needs["burst"] = arriving / capacity
        excess = pending - allowed
        if excess > 0:
            # A new group helps once it has started; the running ones continue until then.
            within_s = settings.recover_s + state.start_s
            needs["backlog"] = (arriving + excess / within_s) / capacity
    elif pending:
        # The speed is unknown because no prompt was computed: one group is enough to measure it.
        needs["demand"] = 1.0
    reason = max(needs, key=lambda name: needs[name])
    # Sums of floats: an excess of a millionth over n groups does not require another group.
    return ceil(needs[reason] - 1e-6), reason


def num_pending(observation: Observation) -> float:
    """Prompt tokens that wait in groups and at gateways."""
    waiting = sum(group[-1].num_pending_prefill_tokens for group in observation.groups if group)
    return waiting + observation.num_gateway_tokens


def _predicted_wait_s(observation: Observation, speed: float | None) -> float | None:
    num_running = len(observation.groups)
    return num_pending(observation) / (speed * num_running) if speed and num_running else None


def _arrival_rate(group: Sequence[Sample]) -> float:
    """Prompt tokens per second that arrived at a group and were not in its cache."""
    if len(group) < 2:
        return 0.0
    first, last = group[0], group[-1]
    computed = last.num_prefilled_tokens - first.num_prefilled_tokens
    came = computed + last.num_pending_prefill_tokens - first.num_pending_prefill_tokens
    return max(came, 0) / max(last.time_s - first.time_s, METRICS_INTERVAL_S)


def _learn(observation: Observation, state: State) -> State:
    """Updates the groups' common speed and the average arrival rate, once for each new sample."""
    newest_s = max((group[-1].time_s for group in observation.groups if group), default=-inf)
    if newest_s <= state.learnt_s:
        return state
    arriving = sum(_arrival_rate(group) for group in observation.groups)
    share = 1 - exp((state.learnt_s - newest_s) / _SMOOTHED_S)  # 1 the first time.
    usual = state.usual_arrival_rate + share * (arriving - state.usual_arrival_rate)
    state = replace(state, usual_arrival_rate=usual, learnt_s=newest_s)
    tokens = seconds = 0.0
    for group in observation.groups:
        if group:
            tokens += group[-1].num_full_step_tokens - group[0].num_full_step_tokens
            seconds += group[-1].full_step_s - group[0].full_step_s
    if seconds < _MIN_FULL_S or tokens <= 0:
        return state
    speed = tokens / seconds
    if state.speed is not None:
        speed = _SPEED_KEPT * state.speed + (1 - _SPEED_KEPT) * speed
    return replace(state, speed=speed)


def _learn_start(observation: Observation, state: State, now_s: float) -> State:
    if state.asked_s is None:
        return state
    taken_s = now_s - state.asked_s
    if len(observation.groups) >= observation.num_groups:
        return replace(state, start_s=taken_s, asked_s=None)
    return replace(state, start_s=max(state.start_s, taken_s))


def _bounded(num_groups: int, settings: AutoscalingSettings) -> int:
    return max(settings.min_groups, min(num_groups, settings.max_groups))
