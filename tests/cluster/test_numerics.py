"""Groups of different numerics are not mixed: no stream continues with other bits, and a rolling
upgrade from one kind to another completes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
NUM_TOKENS = 120
SLOW_S, FAST_S = 0.1, 0.002
AVX512, AVX2 = "cpu avx512-1a, torch 2", "cpu avx2-2b, torch 2"


@pytest.fixture
async def old(start_cluster: Any) -> AsyncIterator[Any]:
    """A cluster of one group, with AVX-512."""
    said = {"numerics": AVX512}
    async with start_cluster(num_groups=1, group_wait_s=30, description=said) as cluster:
        yield cluster


def generate(cluster: Any) -> Any:
    params = pb.SamplingParams(seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
    ids = pb.TokenIds(ids=PROMPT)
    return cluster.inference.Generate(pb.GenerateRequest(token_ids=ids, sampling=params))


async def tokens_of(call: Any) -> list[int]:
    return [token_id async for chunk in call for token_id in chunk.token_ids]


async def refused(cluster: Any, name: str) -> str:
    """Waits until the group ``name`` is refused; returns the reason."""
    while not (troubles := [x for x in cluster.connections.troubles() if f"group {name} " in x]):
        await asyncio.sleep(0.01)
    (trouble,) = troubles
    return str(trouble)


async def test_a_group_of_other_numerics_is_refused_with_both_and_how_to_roll(
    old: Any, start_group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (first,) = old.groups.values()
    async with start_group("new", description={"numerics": AVX2}) as new:
        old.connections.set_addresses([first.address, new.address])
        trouble = await refused(old, "new")
        assert f"group new has numerics={AVX2!r}, this gateway {AVX512!r}" in trouble
        assert "used once no group of the former kind takes requests" in trouble
        assert "serve the new groups as an application of their own" in trouble
        assert trouble.partition(": ")[2] in caplog.text
        assert old.connections.num_ready == 1


async def test_a_stream_never_goes_on_in_a_group_of_other_numerics(
    old: Any, start_group: Any
) -> None:
    (first,) = old.groups.values()
    first.executor.step_s = SLOW_S
    call = generate(old)
    await anext(aiter(call))
    async with start_group("new", description={"numerics": AVX2}) as new:
        old.connections.set_addresses([first.address, new.address])
        await refused(old, "new")
        await first.kill()
        with pytest.raises(grpc.aio.AioRpcError, match="the model was replaced while") as raised:
            await tokens_of(call)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert new.executor.num_steps == 0
        # Clients may retry at once.
        assert len(await tokens_of(generate(old))) == NUM_TOKENS
        await first.settle()


async def test_groups_of_other_numerics_take_over_while_the_last_of_the_former_drains(
    old: Any, start_group: Any
) -> None:
    (first,) = old.groups.values()
    first.executor.step_s = SLOW_S
    call = generate(old)
    chunks = [await anext(aiter(call))]
    async with start_group("new", description={"numerics": AVX2}) as new:
        old.connections.set_addresses([first.address, new.address])
        await refused(old, "new")
        # The whole drain time is for handing over, but no group can take the stream.
        drained = asyncio.create_task(first.service.drain(timeout_s=60, handover_s=60))
        other = await tokens_of(generate(old))
        assert new.executor.num_steps > 0
        first.executor.step_s = FAST_S
        found = [*chunks[0].token_ids, *await tokens_of(call)]
        assert await drained == 0
    assert found == other == old.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_a_request_without_tokens_yet_goes_where_the_groups_of_other_numerics_are(
    old: Any, start_group: Any
) -> None:
    (first,) = old.groups.values()
    await first.kill()
    await old.wait_ready(0)
    waiting = asyncio.create_task(tokens_of(generate(old)))
    while not old.connections.demand.num_tokens:
        await asyncio.sleep(0.01)
    async with start_group("new", description={"numerics": AVX2}) as new:
        old.connections.set_addresses([new.address])
        found = await waiting
    assert found == old.model.continuation(PROMPT, seed=5, max_tokens=NUM_TOKENS)


async def test_groups_that_were_described_before_others_came_are_checked_once_more(
    old: Any, start_group: Any
) -> None:
    """Groups of two kinds that join at the same time: either of them is refused."""
    (first,) = old.groups.values()
    await first.kill()
    await old.wait_ready(0)
    async with (
        start_group("new", description={"numerics": AVX2}) as new,
        start_group("newer", description={"numerics": AVX512}) as newer,
    ):
        old.connections.set_addresses([new.address, newer.address])
        await old.wait_ready(1)
        while not any("numerics" in trouble for trouble in old.connections.troubles()):
            await asyncio.sleep(0.01)
        assert old.connections.num_ready == 1
