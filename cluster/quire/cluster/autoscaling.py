"""How many replica groups there should be: decided by `decide`, asked by Ray Serve through
`ServePolicy`.

`decide` is a function of what the groups said, of what it decided before, and of the time that it
is given. It goes up at once and as far as is needed; it goes down by one group at a time, and only
after fewer have been enough for ``down_delay_s``. Where a group that runs has not been heard of,
it does not go down: a hung group and an idle one look alike.

Needed is the largest of four numbers of groups (`_need`): for prompt tokens that arrive, and those
that wait already, at the speed that the groups were seen to have; for KV cache; for sequences.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, exp, inf
from typing import TYPE_CHECKING, Any

from quire.worker.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 1.0
"""So often a group says how it is."""
LOOK_BACK_S = 6.0
"""So long Serve keeps what was said."""
_STALE_S = 5.0
"""A group whose last word is older has not been heard of."""
_MIN_FULL_S = 0.2
"""Seconds of full steps in the window before a speed is taken from them: one or two say little."""
_PACE_KEPT = 0.7
"""Of the speed known, at each new measurement."""
_SMOOTHED_S = 30.0
"""Over so long arrivals are averaged; a short window would take chance for load."""
_NOTHING = 0.01
"""Of one group: an average fades and never ends."""
_MAX_PATIENCE = 8.0
_STATE = "quire"
DEMAND_PREFIX = "gateway_tokens/"
"""Before a gateway's name: prompt tokens that wait there for any group, as a group was told."""


@dataclass(frozen=True, kw_only=True)
class AutoscalingSettings:
    """When groups are started and stopped.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    min_groups: int = 1
    """0 lets the last group go too. Requests that come then wait until one is there again."""
    max_groups: int = 1
    target_ttft_s: float = 2.0
    """Prompts should not wait longer than this for their turn."""
    max_kv_use: float = 0.8
    """The share of KV blocks that running requests may hold, over all groups."""
    max_busy: float = 0.85
    """The share of the groups' prefill speed that arriving prompts may take."""
    recover_s: float = 10.0
    """Within how long of a group's start a backlog beyond the target should be gone: shorter asks
    for more groups."""
    down_use: float = 0.7
    """A group is one too many when the others would stay within this share of every limit."""
    down_delay_s: float = 120.0
    """For so long, without a break, before it goes."""
    down_step_s: float = 15.0
    """Between one group's going and the next one's."""
    idle_delay_s: float = 600.0
    """Without any work, before the last group goes."""
    start_wait_s: float = 120.0
    """How long requests wait for the first group to start, where there may be none."""

    def __post_init__(self) -> None:
        if self.min_groups < 0:
            raise ConfigError(f"min_groups={self.min_groups!r}: must be 0 or more")
        if self.max_groups < max(self.min_groups, 1):
            raise ConfigError(
                f"max_groups={self.max_groups!r}: must be 1 or more, and not below "
                f"min_groups={self.min_groups!r}"
            )
        for name in ("target_ttft_s", "recover_s", "start_wait_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        for name in ("max_kv_use", "max_busy", "down_use"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: must be a share above 0 and up to 1"
                )
        for name in ("down_delay_s", "down_step_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more")
        # What Serve still remembers of a queue would wake the group again that has just gone.
        if self.idle_delay_s < LOOK_BACK_S + 2 * METRICS_INTERVAL_S:
            raise ConfigError(
                f"idle_delay_s={self.idle_delay_s!r}: must be "
                f"{LOOK_BACK_S + 2 * METRICS_INTERVAL_S:g} or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a group said of itself at one time."""

    time_s: float
    num_pending_prefill_tokens: int = 0
    num_prefilled_tokens: int = 0
    """Counter: prompt tokens computed."""
    num_full_step_tokens: int = 0
    """Counter: those computed in steps that left prompt tokens waiting."""
    full_step_s: float = 0.0
    """Counter: seconds of those steps."""
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 1
    kv_use: float = 0.0
    """The share of KV blocks that running requests hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What there is to decide by."""

    num_groups: int
    """Asked for so far: those that run, and those that start."""
    groups: Sequence[Sequence[Sample]]
    """Of each group that runs, its latest samples, oldest first; none of one not heard of yet."""
    num_gateway_tokens: int = 0
    """Prompt tokens of requests that wait at gateways, where no group can take them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What is remembered from one decision to the next. Its size is bounded by `max_groups`."""

    pace: float | None = None
    """Prompt tokens a second that a group computes while prompts wait. Where some never waited, it
    is not known, and prompts ask for no group."""
    usual_arrival_rate: float = 0.0
    """Prompt tokens a second that come to all groups and are not cached, smoothed."""
    learnt_s: float = -inf
    """Time of the sample that the two were last learnt from."""
    start_s: float = 0.0
    """How long the last groups took to start, or those that do have taken so far."""
    asked_s: float | None = None
    """When those that start were asked for; ``None`` where none does."""
    last_needed_s: tuple[float, ...] = ()
    """When one group was last needed, when two were, and so on up to ``max_groups``."""
    last_down_s: float = -inf
    patience: float = 1.0
    """Times ``down_delay_s`` that going down waits: grows where going down proved to be wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    num_groups: int
    reason: str
    """What asks for the most groups: demand, burst, prefill, backlog, kv, sequences, none; or that
    a group is unheard of."""
    predicted_wait_s: float | None
    """Of a prompt that comes now, on the groups that run; None where no speed is known."""


def decide(
    observation: Observation, state: State, now_s: float, settings: AutoscalingSettings
) -> tuple[Decision, State]:
    """The number of groups that there should be from now on, and what to remember."""
    state = _learn_start(observation, _learn(observation, state), now_s)
    need, reason = _need(observation, state, settings)
    enough = max(need, _need(observation, state, settings, going_down=True)[0])
    current = observation.num_groups
    if any(not group or now_s - group[-1].time_s > _STALE_S for group in observation.groups):
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
    wait_s = _predicted_wait_s(observation, state.pace)
    return Decision(num_groups=target, reason=reason, predicted_wait_s=wait_s), state


def _one_less(
    current: int, state: State, now_s: float, settings: AutoscalingSettings
) -> tuple[int, State]:
    """One group fewer if it is time for that, else as many as there are."""
    if current > settings.max_groups:
        return settings.max_groups, state
    spare_s = now_s - state.last_needed_s[current - 1]
    if current == 1:
        is_time = spare_s >= settings.idle_delay_s
    else:
        # Patience is for a load between two numbers of groups, not for one that is clearly less.
        two_spare_s = now_s - state.last_needed_s[current - 2]
        is_time = spare_s >= state.patience * settings.down_delay_s
        is_time = is_time or two_spare_s >= settings.down_delay_s
    if not is_time or now_s - state.last_down_s < settings.down_step_s:
        return current, state
    return current - 1, replace(state, last_down_s=now_s)


def _patience(state: State, now_s: float, settings: AutoscalingSettings) -> float:
    """After going up: more of it if the last going down was so short ago that it was a mistake."""
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
    """The groups that are needed to stay within every limit, and why; or, for going down, within
    the share ``down_use`` of every limit."""
    use = settings.down_use if going_down else 1.0
    latest = [group[-1] for group in observation.groups if group]
    pending = _pending(observation)
    arriving = sum(_arrival_rate(group) for group in observation.groups)
    # Whatever comes needs a group, even between two samples.
    needs = {"none": 0.0, "demand": float(bool(observation.num_gateway_tokens or arriving))}
    if latest:
        num_sequences = sum(sample.num_running + sample.num_waiting for sample in latest)
        needs["sequences"] = num_sequences / (use * latest[0].max_num_seqs)
        needs["kv"] = sum(sample.kv_use for sample in latest) / (use * settings.max_kv_use)
    if state.pace is not None:
        capacity = state.pace * settings.max_busy * use
        usual = state.usual_arrival_rate / capacity
        needs["prefill"] = usual if usual > _NOTHING else 0.0
        allowed = state.pace * settings.target_ttft_s * max(observation.num_groups, 1) * use
        if pending > allowed / 2 and not going_down:
            # A few seconds' arrivals vary by chance: they count once they make prompts wait.
            needs["burst"] = arriving / capacity
        excess = pending - allowed
        if excess > 0:
            # A group that is asked for now helps when it has started; those there go on till then.
            within_s = settings.recover_s + state.start_s
            needs["backlog"] = (arriving + excess / within_s) / capacity
    elif pending:
        # Nothing was ever computed, so that there is no saying how much is too much.
        needs["demand"] = 1.0
    reason = max(needs, key=lambda name: needs[name])
    # Sums of floats: what is a millionth too much for n groups does not need another one.
    return ceil(needs[reason] - 1e-6), reason


def _pending(observation: Observation) -> int:
    """Prompt tokens that wait, in groups and at gateways."""
    waiting = sum(group[-1].num_pending_prefill_tokens for group in observation.groups if group)
    return waiting + observation.num_gateway_tokens


def _predicted_wait_s(observation: Observation, pace: float | None) -> float | None:
    num_running = len(observation.groups)
    return _pending(observation) / (pace * num_running) if pace and num_running else None


def _arrival_rate(group: Sequence[Sample]) -> float:
    """Prompt tokens a second that came to a group and were not in its cache."""
    if len(group) < 2:
        return 0.0
    first, last = group[0], group[-1]
    computed = last.num_prefilled_tokens - first.num_prefilled_tokens
    came = computed + last.num_pending_prefill_tokens - first.num_pending_prefill_tokens
    return max(came, 0) / max(last.time_s - first.time_s, METRICS_INTERVAL_S)


def _learn(observation: Observation, state: State) -> State:
    """Takes the groups' common speed, and what arrives on average, once for each new sample."""
    newest_s = max((group[-1].time_s for group in observation.groups if group), default=-inf)
    if newest_s <= state.learnt_s:
        return state
    arriving = sum(_arrival_rate(group) for group in observation.groups)
    share = 1 - exp((state.learnt_s - newest_s) / _SMOOTHED_S)  # All of it, the first time.
    usual = state.usual_arrival_rate + share * (arriving - state.usual_arrival_rate)
    state = replace(state, usual_arrival_rate=usual, learnt_s=newest_s)
    tokens = seconds = 0.0
    for group in observation.groups:
        if group:
            tokens += group[-1].num_full_step_tokens - group[0].num_full_step_tokens
            seconds += group[-1].full_step_s - group[0].full_step_s
    if seconds < _MIN_FULL_S or tokens <= 0:
        return state
    pace = tokens / seconds
    if state.pace is not None:
        pace = _PACE_KEPT * state.pace + (1 - _PACE_KEPT) * pace
    return replace(state, pace=pace)


def _learn_start(observation: Observation, state: State, now_s: float) -> State:
    if state.asked_s is None:
        return state
    taken_s = now_s - state.asked_s
    if len(observation.groups) >= observation.num_groups:
        return replace(state, start_s=taken_s, asked_s=None)
    return replace(state, start_s=max(state.start_s, taken_s))


def _bounded(num_groups: int, settings: AutoscalingSettings) -> int:
    return max(settings.min_groups, min(num_groups, settings.max_groups))


class ServePolicy:
    """`decide` as Ray Serve calls it: made once in Serve's controller, asked every 0.1 s."""

    def __init__(self, **settings: Any) -> None:
        """``settings`` are the fields of `AutoscalingSettings`."""
        self._settings = AutoscalingSettings(**settings)

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        assert context.current_time is not None
        state: State = context.policy_state.get(_STATE) or State()
        observation = observe(context, now_s=context.current_time)
        decision, state = decide(observation, state, context.current_time, self._settings)
        if decision.num_groups != observation.num_groups:
            _log.warning(
                "%d groups instead of %d: %s; %d prompt tokens wait, for %s",
                decision.num_groups,
                observation.num_groups,
                decision.reason,
                _pending(observation),
                "nobody knows how long"
                if decision.predicted_wait_s is None
                else f"{decision.predicted_wait_s:.1f} s",
            )
        return decision.num_groups, {_STATE: state}


def observe(context: "AutoscalingContext", *, now_s: float) -> Observation:
    """What Serve knows, in `decide`'s terms."""
    metrics = context.raw_metrics or {}
    groups = []
    for replica in context.running_replicas:
        series = {name: by_replica.get(replica, ()) for name, by_replica in metrics.items()}
        groups.append(_samples(series))
    num_gateway_tokens = 0
    for name, by_replica in metrics.items():
        if name.startswith(DEMAND_PREFIX):
            points = [series[-1] for series in by_replica.values() if series]
            newest = max(points, key=lambda point: point.timestamp, default=None)
            # A gateway repeats what it says while there is something to say.
            if newest is not None and now_s - newest.timestamp <= _STALE_S:
                num_gateway_tokens += int(newest.value)
    return Observation(
        num_groups=context.target_num_replicas,
        groups=groups,
        num_gateway_tokens=num_gateway_tokens,
    )


def _samples(series: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """One sample for each time at which a group said all that belongs to one."""
    names = [field.name for field in fields(Sample) if field.name != "time_s"]
    if not all(series.get(name) for name in names):
        return []
    by_time: dict[float, dict[str, float]] = {}
    for name in names:
        for point in series[name]:
            by_time.setdefault(point.timestamp, {})[name] = point.value
    return [
        Sample(
            time_s=time_s,
            num_pending_prefill_tokens=int(values["num_pending_prefill_tokens"]),
            num_prefilled_tokens=int(values["num_prefilled_tokens"]),
            num_full_step_tokens=int(values["num_full_step_tokens"]),
            full_step_s=values["full_step_s"],
            num_running=int(values["num_running"]),
            num_waiting=int(values["num_waiting"]),
            max_num_seqs=int(values["max_num_seqs"]),
            kv_use=values["kv_use"],
        )
        for time_s, values in sorted(by_time.items())
        if len(values) == len(names)
    ]
