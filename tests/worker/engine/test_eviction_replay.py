"""The default eviction policy on traces and workloads, against known policies and the optimum."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.prepared import prepared

from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.eviction import LowestUtility, PolicyFactory
from quire.worker.group_engine import GroupEngine

MakeEngine = Callable[..., tuple[GroupEngine, Any]]

TRACE = Path(__file__).parents[4] / "shared/data/traces/mooncake_conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here")

WORKLOADS = {
    "agents": {"num_turns": 1500},
    "scans": {"num_requests": 2000},
    "long_tails": {"num_requests": 2000},
    "periodic": {"num_requests": 2000},
}


class Bench:
    """The modules of `bench.eviction`."""

    def __init__(self, bench_module: Callable[[str], ModuleType]) -> None:
        self.baselines = bench_module("eviction.baselines")
        self.replay = bench_module("eviction.replay")

    def prompts(self, name: str, **sizes: int) -> list[Any]:
        made: list[Any] = getattr(self.replay, name)(**(sizes or WORKLOADS[name]))
        return made

    def hit_rate(self, prompts: list[Any], num_blocks: int, policy: PolicyFactory) -> float:
        rate: float = self.replay.replay(prompts, num_blocks=num_blocks, policy=policy).hit_rate
        return rate

    def best_hit_rate(self, prompts: list[Any], num_blocks: int) -> float:
        future = self.baselines.FurthestNextUse([prompt.hashes for prompt in prompts])
        best: float = self.replay.replay(
            prompts, num_blocks=num_blocks, policy=future.policy, on_request=future.begin
        ).hit_rate
        return best


@pytest.fixture
def bench(bench_module: Callable[[str], ModuleType]) -> Bench:
    return Bench(bench_module)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("num_blocks", [400, 1000])
def test_no_policy_beats_the_one_that_knows_the_future(
    bench: Bench, name: str, num_blocks: int
) -> None:
    prompts = bench.prompts(name)
    best = bench.best_hit_rate(prompts, num_blocks)
    for policy in (LowestUtility, bench.baselines.Lru):
        assert bench.hit_rate(prompts, num_blocks, policy) <= best


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_blocks"), [("scans", 400), ("long_tails", 400)])
def test_what_is_read_once_does_not_push_out_what_is_popular(
    bench: Bench, name: str, num_blocks: int
) -> None:
    prompts = bench.prompts(name)
    ours = bench.hit_rate(prompts, num_blocks, LowestUtility)
    assert ours > 1.2 * bench.hit_rate(prompts, num_blocks, bench.baselines.Lru)


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "share"), [(200, 0.6), (400, 0.9)])
def test_of_jobs_in_turn_that_do_not_all_fit_some_stay(
    bench: Bench, num_blocks: int, share: float
) -> None:
    prompts = bench.prompts("periodic", num_requests=8000)
    assert bench.hit_rate(prompts, num_blocks, bench.baselines.Lru) == 0
    best = bench.best_hit_rate(prompts, num_blocks)
    assert bench.hit_rate(prompts, num_blocks, LowestUtility) > share * best


def test_the_same_events_give_the_same_choices(bench: Bench) -> None:
    prompts, replay = bench.prompts("agents"), bench.replay.replay
    assert replay(prompts, num_blocks=500, policy=LowestUtility) == replay(
        prompts, num_blocks=500, policy=LowestUtility
    )


@needs_trace
@pytest.mark.slow
def test_on_real_conversations_lru_finds_less(bench: Bench) -> None:
    prompts = bench.replay.load_trace(TRACE)
    ours = bench.hit_rate(prompts, 4000, LowestUtility)
    assert ours > 1.1 * bench.hit_rate(prompts, 4000, bench.baselines.Lru)


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param(lambda replay: replay.scans(num_requests=300), id="scans"),
        pytest.param(
            lambda replay: replay.load_trace(TRACE)[:400], id="conversation", marks=needs_trace
        ),
    ],
)
def test_the_engine_counts_the_hits_that_the_replay_predicts(
    make_engine: MakeEngine, bench: Bench, prompts: Callable[[ModuleType], list[Any]]
) -> None:
    num_blocks, block_size = 600, 4
    # The same chains in blocks of few tokens, with one token more at the end.
    scaled = [
        prompt._replace(num_tokens=len(prompt.hashes) * block_size + 1)
        for prompt in prompts(bench.replay)
    ]
    numbers: dict[BlockHash, int] = {}
    # Each prompt in one step, as in the replay: chunks would allocate at other ticks.
    engine, _ = make_engine(
        num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=1024
    )
    for index, prompt in enumerate(scaled):
        engine.add_request(
            prepared(str(index), _token_ids(prompt, numbers, block_size), max_tokens=1)
        )
        while engine.has_work:
            engine.step()
    expected = bench.replay.replay(
        scaled, num_blocks=num_blocks, policy=LowestUtility, block_size=block_size
    )
    stats = engine.stats()
    assert expected.num_hit_tokens > 0
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (
        expected.num_tokens,
        expected.num_hit_tokens,
    )


def _token_ids(prompt: Any, numbers: dict[BlockHash, int], block_size: int) -> Any:
    """Tokens that tell blocks of different hashes apart: the hash's number in digits."""
    digits = [
        numbers.setdefault(block_hash, len(numbers)) // 40**place % 40 + 2
        for block_hash in prompt.hashes
        for place in range(block_size)
    ]
    return np.array([*digits, 2], dtype=np.uint32)
