"""Groups drain under load: no stream fails, and no request is blamed."""

import asyncio
from typing import Any

import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
NUM_TOKENS = 120


def generate(cluster: Any, *, seed: int = 5, max_tokens: int = NUM_TOKENS) -> Any:
    params = pb.SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return cluster.inference.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=params)
    )


async def begin(call: Any) -> list[pb.GenerateResponse]:
    return [await anext(aiter(call))]


async def tokens_of(call: Any, chunks: list[pb.GenerateResponse]) -> list[int]:
    chunks += [chunk async for chunk in call]
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_what_a_draining_group_runs_is_handed_over(start_cluster: Any) -> None:
    async with start_cluster(max_num_seqs=64, num_blocks=4000) as cluster:
        cluster.take_steps_of(0.1)  # No stream ends before all have begun.
        calls = [generate(cluster, seed=seed) for seed in range(20)]
        chunks = [await begin(call) for call in calls]
        draining = cluster.groups[chunks[0][0].start.routing.group]
        num_there = sum(each[0].start.routing.group == draining.name for each in chunks)
        # The whole drain time is for handing over.
        num_left = await draining.service.drain(timeout_s=60, handover_s=60)
        assert num_left == 0
        cluster.take_steps_of(0.002)
        num_steps = draining.executor.num_steps
        found = [await tokens_of(*each) for each in zip(calls, chunks, strict=True)]
        telemetry = cluster.gateway.telemetry
        assert draining.executor.num_steps == num_steps, "it had nothing more to do"
        assert num_steps < NUM_TOKENS
        assert telemetry.handovers._value.get() == num_there
        assert telemetry.resumes._value.get() == 0, "nor does it use the budget up"
        assert cluster.gateway.pipeline.resume.budget.level == 4096
    for seed, tokens in enumerate(found):
        assert tokens == cluster.model.continuation(PROMPT, seed=seed, max_tokens=NUM_TOKENS)


async def test_without_another_group_it_ends_what_it_runs(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        (group,) = cluster.groups.values()
        group.executor.step_s = 0.1
        call = generate(cluster)
        chunks = await begin(call)
        drained = asyncio.create_task(group.service.drain(timeout_s=60, handover_s=60))
        group.executor.step_s = 0.002
        found = await tokens_of(call, chunks)
        assert await drained == 0
        assert cluster.gateway.telemetry.handovers._value.get() == 0
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_what_is_left_at_the_end_of_the_grace_is_given_back(
    start_cluster: Any, start_group: Any
) -> None:
    async with start_cluster(num_groups=1, group_wait_s=30) as cluster, start_group("g1") as other:
        (group,) = cluster.groups.values()
        group.executor.step_s = 0.1
        call = generate(cluster)
        chunks = await begin(call)
        assert await group.service.drain(timeout_s=0) == 1
        cluster.connections.set_addresses([other.address])
        found = await tokens_of(call, chunks)
        await group.settle()
        assert other.executor.num_steps > 0
        assert cluster.gateway.telemetry.resumes._value.get() == 0
    assert found == cluster.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


@pytest.mark.slow
async def test_one_group_after_the_other_is_replaced_under_load(
    start_cluster: Any, start_group: Any
) -> None:
    """A rolling upgrade: one group at a time drains, in all more groups than losses are allowed."""
    async with start_cluster(max_num_seqs=64, num_blocks=4000) as cluster:
        running = list(cluster.groups.values())
        calls = [generate(cluster, seed=seed, max_tokens=300) for seed in range(16)]
        for group in running:
            group.executor.step_s = 0.02
        chunks = [await begin(call) for call in calls]
        reads = [asyncio.create_task(tokens_of(*each)) for each in zip(calls, chunks, strict=True)]
        starts = []
        for number in range(8):
            start = start_group(f"new-{number}", max_num_seqs=64, num_blocks=4000)
            starts.append(start)
            new = await start.__aenter__()
            new.executor.step_s = 0.02
            old = running.pop(0)
            running.append(new)
            cluster.connections.set_addresses([group.address for group in (old, *running)])
            await cluster.wait_ready(3)
            assert await old.service.drain(timeout_s=60, handover_s=60) == 0
            await old.server.stop(None)
            cluster.connections.set_addresses([group.address for group in running])
            await cluster.wait_ready(2)
        for group in running:
            group.executor.step_s = 0.002
        found = await asyncio.gather(*reads)
        assert cluster.gateway.telemetry.handovers._value.get() > 5
        for start in starts:
            await start.__aexit__(None, None, None)
    for seed, tokens in enumerate(found):
        assert tokens == cluster.model.continuation(PROMPT, seed=seed, max_tokens=300)
