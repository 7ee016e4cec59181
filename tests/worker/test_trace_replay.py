"""The default eviction policy on traces and workloads, against known policies and the optimum."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.worker.engine import Engine
from quire.worker.eviction import LowestUtility, PolicyFactory
from quire.worker.eviction_baselines import FurthestNextUse, S3Fifo, by_score, gdsf, lfu, lru
from quire.worker.hashing import BlockHash
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams
from quire.worker.trace_replay import (
    Prompt,
    agents,
    load_trace,
    long_tails,
    periodic,
    replay,
    scans,
)

MakeEngine = Callable[..., tuple[Engine, Any]]

TRACE = Path(__file__).parents[3] / "shared/data/traces/mooncake_conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not here")

WORKLOADS = {
    "agents": agents(num_turns=1500),
    "scans": scans(num_requests=2000),
    "long_tails": long_tails(num_requests=2000),
    "periodic": periodic(num_requests=2000),
}


def hit_rate(prompts: list[Prompt], num_blocks: int, policy: PolicyFactory) -> float:
    return replay(prompts, num_blocks=num_blocks, policy=policy).hit_rate


def best_hit_rate(prompts: list[Prompt], num_blocks: int) -> float:
    future = FurthestNextUse([prompt.hashes for prompt in prompts])
    return replay(
        prompts, num_blocks=num_blocks, policy=future.policy, on_request=future.begin
    ).hit_rate


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("num_blocks", [400, 1000])
def test_no_policy_beats_the_one_that_knows_the_future(name: str, num_blocks: int) -> None:
    prompts = WORKLOADS[name]
    best = best_hit_rate(prompts, num_blocks)
    for policy in (LowestUtility, S3Fifo, by_score(lru), by_score(lfu), by_score(gdsf)):
        assert hit_rate(prompts, num_blocks, policy) <= best


@pytest.mark.parametrize(("name", "num_blocks"), [("scans", 400), ("long_tails", 400)])
def test_what_is_read_once_does_not_push_out_what_is_popular(name: str, num_blocks: int) -> None:
    prompts = WORKLOADS[name]
    ours = hit_rate(prompts, num_blocks, LowestUtility)
    assert ours > 1.2 * hit_rate(prompts, num_blocks, by_score(lru))


@pytest.mark.parametrize(("num_blocks", "share"), [(200, 0.6), (400, 0.9)])
def test_of_jobs_in_turn_that_do_not_all_fit_some_stay(num_blocks: int, share: float) -> None:
    prompts = periodic(num_requests=8000)
    assert hit_rate(prompts, num_blocks, by_score(lru)) == 0
    best = best_hit_rate(prompts, num_blocks)
    assert hit_rate(prompts, num_blocks, LowestUtility) > share * best


def test_the_same_events_give_the_same_choices() -> None:
    prompts = WORKLOADS["agents"]
    assert replay(prompts, num_blocks=500, policy=LowestUtility) == replay(
        prompts, num_blocks=500, policy=LowestUtility
    )


@needs_trace
@pytest.mark.slow
def test_on_real_conversations_lru_and_s3_fifo_find_less() -> None:
    prompts = load_trace(TRACE)
    ours = hit_rate(prompts, 4000, LowestUtility)
    assert ours > 1.1 * hit_rate(prompts, 4000, by_score(lru))
    assert ours > 1.1 * hit_rate(prompts, 4000, S3Fifo)


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param(lambda: scans(num_requests=300), id="scans"),
        pytest.param(lambda: load_trace(TRACE)[:400], id="conversation", marks=needs_trace),
    ],
)
def test_the_engine_counts_the_hits_that_the_replay_predicts(
    make_engine: MakeEngine, prompts: Callable[[], list[Prompt]]
) -> None:
    num_blocks, block_size = 600, 4
    scaled = [_scaled(prompt, block_size) for prompt in prompts()]
    numbers: dict[BlockHash, int] = {}
    # Each prompt in one step, as in the replay: chunks would allocate at other ticks.
    engine, _ = make_engine(
        num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=1024
    )
    for index, prompt in enumerate(scaled):
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=_token_ids(prompt, numbers, block_size),
                params=SamplingParams(max_tokens=1),
            )
        )
        while engine.has_work:
            engine.step()
    expected = replay(scaled, num_blocks=num_blocks, policy=LowestUtility, block_size=block_size)
    stats = engine.stats()
    assert expected.num_hit_tokens > 0
    assert (stats.num_prompt_tokens, stats.num_hit_tokens) == (
        expected.num_tokens,
        expected.num_hit_tokens,
    )


def _scaled(prompt: Prompt, block_size: int) -> Prompt:
    """The same blocks, but of few tokens, and a last token of its own."""
    return Prompt(prompt.hashes, len(prompt.hashes) * block_size + 1)


def _token_ids(prompt: Prompt, numbers: dict[BlockHash, int], block_size: int) -> Any:
    """Tokens that tell blocks of different hashes apart: the hash's number in digits."""
    digits = [
        numbers.setdefault(block_hash, len(numbers)) // 40**place % 40 + 2
        for block_hash in prompt.hashes
        for place in range(block_size)
    ]
    return np.array([*digits, 2], dtype=np.uint32)
