"""The autoscaling policy on a virtual clock, with groups of a queue and a speed."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from quire.cluster.features.autoscale.policy import (
    Observation,
    Sample,
    ScalingDecision,
    State,
    decide,
)
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.worker.request.errors import ConfigError

SPEED = 1000.0  # Prompt tokens per second.
TICK_S = 0.1  # Serve's interval; groups report every tenth.
SETTINGS = AutoscalingSettings(
    min_groups=1, max_groups=8, target_ttft_s=2, down_delay_s=60, down_step_s=10, idle_delay_s=100
)


@dataclass
class Group:
    """Computes waiting tokens at ``SPEED``, in order."""

    ready_s: float
    pending: float = 0.0
    prefilled: float = 0.0
    full_tokens: float = 0.0
    full_s: float = 0.0
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=7))

    def run(self, seconds: float) -> None:
        done = min(self.pending, SPEED * seconds)
        self.pending -= done
        self.prefilled += done
        if self.pending:
            self.full_tokens += done
            self.full_s += seconds

    def report(self, now_s: float) -> None:
        self.samples.append(
            Sample(
                time_s=now_s,
                num_pending_prefill_tokens=round(self.pending),
                num_prefilled_tokens=round(self.prefilled),
                num_full_step_tokens=round(self.full_tokens),
                full_step_s=self.full_s,
                num_running=0,
                max_num_seqs=100,
            )
        )


@dataclass
class World:
    """Groups that take ``start_s`` to start; tokens that arrive go to the shortest queue."""

    settings: AutoscalingSettings
    start_s: float = 20.0
    now_s: float = 0.0
    groups: list[Group] = field(default_factory=list)
    state: State = field(default_factory=State)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    at_gateways: float = 0.0

    def __post_init__(self) -> None:
        self.groups += [Group(ready_s=0) for _ in range(self.settings.min_groups)]

    def run(self, seconds: float, arrivals: Callable[[float], float]) -> ScalingDecision:
        """Runs ticks; ``arrivals`` gives the tokens that arrive in the tick at a time."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            running = [group for group in self.groups if group.ready_s <= self.now_s]
            self.at_gateways += arrivals(self.now_s)
            if running:
                shortest = min(running, key=lambda group: group.pending)
                shortest.pending += self.at_gateways
                self.at_gateways = 0
            for group in running:
                group.run(TICK_S)
                if round(self.now_s / TICK_S) % 10 == 0:
                    group.report(self.now_s)
            decision = self.decide(running)
        return decision

    def decide(self, running: list[Group]) -> ScalingDecision:
        observation = Observation(
            num_groups=len(self.groups),
            groups=[tuple(group.samples) for group in running],
            num_gateway_tokens=round(self.at_gateways),
        )
        decision, self.state = decide(observation, self.state, self.now_s, self.settings)
        while len(self.groups) < decision.num_groups:
            self.groups.append(Group(ready_s=self.now_s + self.start_s))
        del self.groups[decision.num_groups :]
        if not self.sizes or self.sizes[-1][1] != decision.num_groups:
            self.sizes.append((self.now_s, decision.num_groups))
        return decision


def steady(groups: float) -> Callable[[float], float]:
    """Arrivals that fully occupy ``groups`` groups."""
    return lambda _: groups * SPEED * TICK_S


def noisy(groups: float, seed: int = 0) -> Callable[[float], float]:
    """As `steady` on average, in prompts of 100 to 2,000 tokens at random times."""
    rng = random.Random(seed)

    def arrivals(_: float) -> float:
        mean = 1050.0
        return rng.randint(100, 2000) if rng.random() < groups * SPEED * TICK_S / mean else 0

    return arrivals


def test_a_burst_is_answered_within_two_seconds_and_by_enough() -> None:
    world = World(SETTINGS)
    world.run(60, steady(0.4))
    assert [size for _, size in world.sizes] == [1]
    world.run(2, steady(4))
    (decided_s, num_groups), *_ = world.sizes[1:]
    assert decided_s - 60 <= 2.0
    assert num_groups >= 2
    world.run(8, steady(4))
    assert len(world.groups) >= 5  # Four at full speed are 4 / 0.85 within the limit.
    world.run(120, steady(4))
    assert world.state.speed == pytest.approx(SPEED, rel=0.01)
    observation = [group.pending for group in world.groups]
    assert sum(observation) / (SPEED * len(world.groups)) < SETTINGS.target_ttft_s


def test_groups_that_start_are_not_asked_for_again() -> None:
    world = World(SETTINGS, start_s=60)
    world.run(30, steady(0.5))
    world.run(60, steady(2))
    assert len(world.groups) < SETTINGS.max_groups


def test_down_is_slow_and_one_at_a_time() -> None:
    world = World(SETTINGS)
    world.run(30, steady(4))
    before = len(world.groups)
    world.sizes.clear()
    world.run(50, steady(0.2))
    assert len(world.groups) >= before
    world.run(300, steady(0.2))
    sizes = [size for _, size in world.sizes]
    assert sizes[-1] == 1
    assert all(after == earlier - 1 for earlier, after in itertools.pairwise(sizes))
    times = [time_s for time_s, _ in world.sizes[1:]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(gap >= SETTINGS.down_step_s - TICK_S for gap in gaps)


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("load", [0.6, 1.7, 3.3])
def test_noise_does_not_make_it_flap(load: float, seed: int) -> None:
    world = World(SETTINGS)
    world.run(300, noisy(load, seed))
    world.sizes.clear()
    world.run(900, noisy(load, seed + 100))
    turns = sum(
        (b - a) * (c - b) < 0
        for (_, a), (_, b), (_, c) in zip(
            world.sizes, world.sizes[1:], world.sizes[2:], strict=False
        )
    )
    assert turns <= 6, world.sizes  # In 9,000 decisions.
    assert world.sizes[-1][1] <= load / (SETTINGS.max_busy * SETTINGS.down_use) + 2


def test_the_last_group_goes_when_idle_and_comes_back_for_a_request_at_a_gateway() -> None:
    settings = AutoscalingSettings(min_groups=0, max_groups=2, idle_delay_s=100)
    world = World(settings, start_s=5)
    world.run(10, steady(0))
    assert not world.groups
    world.run(TICK_S, lambda _: 300.0)
    assert len(world.groups) == 1
    world.run(20, steady(0))
    assert world.at_gateways == 0
    assert world.groups[0].prefilled == 300
    world.run(70, steady(0))
    assert len(world.groups) == 1
    world.run(60, steady(0))
    assert not world.groups


@pytest.mark.parametrize(
    ("load", "reason", "num_groups"),
    [
        ({"kv_use": 0.95}, "kv", 3),
        ({"num_running": 100, "num_waiting": 120}, "sequences", 5),
    ],
)
def test_kv_cache_and_sequences_ask_for_groups_too(
    load: dict[str, float], reason: str, num_groups: int
) -> None:
    sample = Sample(time_s=10, max_num_seqs=100, **load)
    observation = Observation(num_groups=2, groups=[(sample,), (sample,)])
    decision, _ = decide(observation, State(), 10, SETTINGS)
    assert (decision.reason, decision.num_groups) == (reason, num_groups)


def test_a_group_that_is_not_heard_of_keeps_all_groups() -> None:
    fresh, old = Sample(time_s=999, max_num_seqs=100), Sample(time_s=900, max_num_seqs=100)
    for unheard in [(old,), ()]:
        observation = Observation(num_groups=2, groups=[(fresh,), unheard])
        state = State(last_needed_s=(0.0,) * 8)
        decision, _ = decide(observation, state, 1000, SETTINGS)
        assert (decision.reason, decision.num_groups) == ("unheard", 2)
    observation = Observation(num_groups=2, groups=[(fresh,), (fresh,)])
    decision, _ = decide(observation, State(last_needed_s=(0.0,) * 8), 1000, SETTINGS)
    assert decision.num_groups == 1


def test_what_comes_between_two_samples_is_no_idleness() -> None:
    samples = [
        Sample(time_s=i, num_prefilled_tokens=900 if i > 3 else 0, max_num_seqs=100)
        for i in range(7)
    ]
    observation = Observation(num_groups=1, groups=[samples])
    settings = AutoscalingSettings(min_groups=0, max_groups=2)
    state = State(last_needed_s=(-1e9, -1e9))
    assert decide(observation, state, 6, settings)[0].num_groups == 1
    idle = Observation(num_groups=1, groups=[samples[4:]])
    assert decide(idle, state, 6, settings)[0].num_groups == 0


def test_a_load_that_is_gone_is_forgotten_soon() -> None:
    settings = AutoscalingSettings(min_groups=0, max_groups=8, down_delay_s=60, idle_delay_s=100)
    world = World(settings, start_s=5)
    world.run(60, steady(3))
    world.run(400, steady(0))
    assert not world.groups


def test_prompts_that_never_wait_ask_for_no_group() -> None:
    """Any number of short prompts may run beside the decodes of a group that is not full."""
    samples = [
        Sample(time_s=i, num_prefilled_tokens=900 * i, num_running=20, max_num_seqs=100)
        for i in range(7)
    ]
    decision, state = decide(Observation(num_groups=1, groups=[samples]), State(), 6, SETTINGS)
    assert decision.num_groups == 1
    assert state.speed is None


def test_a_prediction_is_what_waits_over_what_the_groups_do() -> None:
    sample = Sample(time_s=1, num_pending_prefill_tokens=3000, max_num_seqs=100)
    observation = Observation(num_groups=3, groups=[(sample,), (sample,)], num_gateway_tokens=2000)
    state = State(speed=SPEED, learnt_s=1)
    decision, _ = decide(observation, state, 1, SETTINGS)
    assert decision.predicted_wait_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_groups": -1}, "min_groups=-1: must be 0 or more"),
        ({"min_groups": 3, "max_groups": 2}, "max_groups=2: must be 1 or more, and not below min"),
        ({"target_ttft_s": 0}, "target_ttft_s=0: must be above 0"),
        ({"max_kv_use": 1.5}, "max_kv_use=1.5: must be a share"),
        ({"idle_delay_s": 1}, "idle_delay_s=1: must be 8 or more"),
        ({"down_delay_s": -1}, "down_delay_s=-1: must be 0 or more"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        AutoscalingSettings(**given)  # type: ignore[arg-type]
    assert message in str(raised.value)
