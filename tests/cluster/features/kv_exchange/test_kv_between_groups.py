"""Requests that fetch blocks from another group get the same tokens under any network fault."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.group_calls import connect, read_deltas, submit, tokens
from tests.flaky_proxy import Fault, FlakyProxy
from tests.prepared import prepared

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.group.server import GroupServer
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.parts.tiers import arriving
from quire.worker.request.config import EngineConfig

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 122))
NUM_BLOCKS = 25
"""Number of the prompt's full blocks."""
FRAME_BYTES = 64 + 32


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests wait for their blocks on a busy machine."""
    monkeypatch.setattr(arriving, "MIN_SLACK_S", 60.0)
    monkeypatch.setattr(arriving, "_UNKNOWN_SLACK_S", 60.0)


async def ask(
    group: Any, prompt: list[int] = PROMPT, *, source: group_pb2.BlockSource | None = None
) -> list[group_pb2.TokenDelta]:
    async with connect(group) as stub:
        call = stub.Attach()
        command = submit("a", prompt)
        if source is not None:
            command.submit.source.CopyFrom(source)
        await call.write(command)
        return await read_deltas(call, "a")


def source_of(group: Any, **changes: Any) -> group_pb2.BlockSource:
    said = {"group_id": group.name, "address": group.address, "num_blocks": NUM_BLOCKS}
    return group_pb2.BlockSource(**{**said, **changes})


@contextlib.asynccontextmanager
async def two_groups(start_group: Any) -> AsyncIterator[tuple[Any, Any]]:
    """Two groups, the first of which has computed the prompt. At the end neither may hold loans."""
    options = {"kv_transfer": True}
    async with start_group("g0", **options) as lender, start_group("g1", **options) as borrower:
        await ask(lender)
        yield lender, borrower
        for group in (lender, borrower):
            await group.settle()
            transfers = group.engine.transfers
            while transfers.has_work or transfers.host_tier.num_free != len(
                group.executor.host_blocks_XC
            ):
                await asyncio.sleep(0.01)
            assert group.peers.num_loans == 0


async def fetched_by(model: Any, borrower: Any, source: group_pb2.BlockSource) -> group_pb2.Fetched:
    """Runs a request, asserts its tokens, and returns its report of fetched blocks."""
    deltas = await ask(borrower, source=source)
    assert tokens(deltas) == model.continuation(PROMPT, seed=1, max_tokens=10)
    assert deltas[0].num_cached_tokens >= deltas[0].fetched.num_peer_tokens
    return deltas[0].fetched


@pytest.mark.usefixtures("patient")
async def test_a_request_takes_blocks_of_another_group(start_group: Any, model: Any) -> None:
    async with two_groups(start_group) as (lender, borrower):
        fetched = await fetched_by(model, borrower, source_of(lender))
        assert (fetched.num_peer_tokens, fetched.error) == (4 * NUM_BLOCKS, "")
        borrowed = await borrower.engine_loop.call(lambda engine: engine.stats())
        lent = await lender.engine_loop.call(lambda engine: engine.stats())
        assert borrowed.num_peer_tokens == lent.num_lent_tokens == 4 * NUM_BLOCKS
        assert borrowed.num_prefilled_tokens == len(PROMPT) - 4 * NUM_BLOCKS


FAULTS = {
    **{f"cut at {at}": Fault(cut_at=at) for at in (0, 40, 64, 70, FRAME_BYTES, 9 * FRAME_BYTES)},
    **{f"flip at {at}": Fault(flip_at=at) for at in (1, 6, 20, 50, 70, 5 * FRAME_BYTES + 90)},
    "stopped at once": Fault(stall_at=0),
    "stopped in a block": Fault(stall_at=3 * FRAME_BYTES + 80),
    "slow": Fault(bytes_per_s=200),
    "swapped": Fault(
        edit=lambda stream: (
            stream[FRAME_BYTES : 2 * FRAME_BYTES] + stream[:FRAME_BYTES] + stream[2 * FRAME_BYTES :]
        )
    ),
    "truncated": Fault(edit=lambda stream: stream[: 7 * FRAME_BYTES + 10]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_its_tokens_are_the_same_whatever_happens_to_the_blocks(
    start_group: Any, model: Any, fault: Fault
) -> None:
    async with two_groups(start_group) as (lender, borrower):
        listener = lender.peers._lender._listener
        with FlakyProxy(listener.port, fault) as proxy:
            listener.port = proxy.port
            fetched = await fetched_by(model, borrower, source_of(lender))
            assert fetched.num_peer_tokens < 4 * NUM_BLOCKS
            assert fetched.error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"address": "127.0.0.1:1"}, "peer g0 at 127.0.0.1:1: asking: UNAVAILABLE"),
        ({"num_blocks": NUM_BLOCKS}, "it refused: it has none of these blocks"),
    ],
)
async def test_a_source_that_is_gone_or_has_nothing_costs_a_request_only_time(
    start_group: Any, model: Any, changes: dict[str, Any], reason: str
) -> None:
    async with two_groups(start_group) as (lender, borrower):
        assert await lender.engine_loop.call(lambda engine: engine.reset_prefix_cache())
        fetched = await fetched_by(model, borrower, source_of(lender, **changes))
        assert fetched.num_peer_tokens == 0
        assert reason in fetched.error


async def test_a_peer_that_is_killed_in_between_is_named(start_group: Any, model: Any) -> None:
    async with two_groups(start_group) as (lender, borrower):
        listener = lender.peers._lender._listener
        with FlakyProxy(listener.port, Fault(stall_at=5 * FRAME_BYTES)) as proxy:
            listener.port = proxy.port
            asked = asyncio.create_task(fetched_by(model, borrower, source_of(lender)))
            while not borrower.peers._borrower.num_pulls:
                await asyncio.sleep(0.005)
            await lender.kill()
        fetched = await asked
        assert fetched.num_peer_tokens < 4 * NUM_BLOCKS
        assert fetched.error


@pytest.mark.usefixtures("patient")
async def test_two_groups_borrow_from_a_third_at_once(start_group: Any, model: Any) -> None:
    async with (
        two_groups(start_group) as (lender, borrower),
        start_group("g2", kv_transfer=True) as other,
    ):
        both = await asyncio.gather(
            *[fetched_by(model, each, source_of(lender)) for each in (borrower, other)]
        )
        assert [each.num_peer_tokens for each in both] == [4 * NUM_BLOCKS] * 2


async def test_an_aborted_request_lets_go_of_its_pull(start_group: Any) -> None:
    async with two_groups(start_group) as (lender, borrower):
        listener = lender.peers._lender._listener
        with FlakyProxy(listener.port, Fault(bytes_per_s=200)) as proxy:
            listener.port = proxy.port
            async with connect(borrower) as stub:
                call = stub.Attach()
                command = submit("a", PROMPT)
                command.submit.source.CopyFrom(source_of(lender))
                await call.write(command)
                while not borrower.peers._borrower.num_pulls:
                    await asyncio.sleep(0.005)
            while borrower.peers._borrower.num_pulls:
                await asyncio.sleep(0.005)


async def test_a_new_group_is_warm_before_its_first_request(start_group: Any, model: Any) -> None:
    async with (
        two_groups(start_group) as (lender, borrower),
        connect(borrower) as stub,
    ):
        request = group_pb2.WarmRequest(sources=[source_of(lender)], max_bytes=10**6)
        answer = await stub.Warm(request)
        # Also the output's blocks.
        assert (answer.num_blocks, answer.error) == ((len(PROMPT) + 9) // 4, "")
        deltas = await ask(borrower)
        assert deltas[0].num_cached_tokens == 4 * NUM_BLOCKS
        assert tokens(deltas) == model.continuation(PROMPT, seed=1, max_tokens=10)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("with_tls", [True, False], ids=["tls", "plain"])
async def test_a_real_model_says_the_same_of_blocks_that_came_from_another_group(
    with_tls: bool,
) -> None:
    files = dict.fromkeys(["tls_certificate", "tls_key"], Path("unread") if with_tls else None)
    config = ClusterConfig(
        engine=EngineConfig(model=demo_model.PATH, num_blocks=64, num_threads=1),
        num_groups=2,
        **files,
    )
    async with contextlib.AsyncExitStack() as stack:
        lender, borrower = [await GroupServer.start(config, group_id=name) for name in "ab"]
        for each in (lender, borrower):
            stack.push_async_callback(each.stop, drain_timeout_s=0)
        prompt = [number % 200 + 5 for number in range(120)]
        asked = prepared("r", prompt, logprobs=3, max_tokens=8, ignore_eos=True)
        computed = [delta async for delta in lender.generate(asked)]
        source = PeerSource(group_id="a", **lender.contact.metadata(), num_blocks=7)
        fetched = [delta async for delta in borrower.generate(replace(asked, source=source))]
        assert fetched[0].fetched is not None
        assert (fetched[0].fetched.num_peer_tokens, fetched[0].fetched.error) == (7 * 16, "")
        for of in (attrgetter("token_ids"), attrgetter("logprobs")):
            assert [of(delta) for delta in fetched] == [of(delta) for delta in computed]


@pytest.mark.usefixtures("patient")
async def test_who_takes_over_a_stream_takes_its_blocks_too(start_cluster: Any) -> None:
    async with start_cluster(kv_transfer=True) as cluster:
        cluster.take_steps_of(0.05)
        params = pb.SamplingParams(seed=5, max_tokens=60, ignore_eos=True)
        call = cluster.inference.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=params)
        )
        chunks = aiter(call)
        found = [await anext(chunks) for _ in range(8)]
        draining = cluster.groups[found[0].start.routing.group]
        (taker,) = [each for each in cluster.groups.values() if each is not draining]
        assert await draining.service.drain(timeout_s=60, handover_s=60) == 0
        cluster.take_steps_of(0.002)
        found += [chunk async for chunk in chunks]
        stats = await taker.engine_loop.call(lambda engine: engine.stats())
        assert stats.num_peer_tokens >= 4 * NUM_BLOCKS
    output = [token for chunk in found for token in chunk.token_ids]
    assert output == cluster.model.continuation(PROMPT, seed=5, max_tokens=60)
