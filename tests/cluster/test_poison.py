"""A request that kills every group that runs it, among a hundred that do not."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import openai
import pytest
from tests.prepared import prepared

from quire.cluster.wire import work_of
from quire.v1 import group_pb2, group_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import RankFailure

pytestmark = pytest.mark.anyio

NUM_INNOCENTS = 100
MAX_GROUP_DEATHS = 3


def generate(cluster: Any, prompt: list[int], *, seed: int, max_tokens: int) -> Any:
    params = pb.SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return cluster.inference.Generate(
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=params)
    )


def prompt_of(number: int) -> list[int]:
    return [20 + number, *range(20, 40)]


async def tokens_of(call: Any, chunks: list[pb.GenerateResponse]) -> list[int]:
    chunks += [chunk async for chunk in call]
    found: list[int] = []
    for chunk in chunks:
        assert chunk.token_offset == len(found)
        found += chunk.token_ids
    return found


def make_deadly(group: Any, *, poison: int, at_length: int) -> None:
    """Makes ``group`` die of a sequence that begins with ``poison`` and has reached a length."""
    execute = group.executor.execute

    def check(step: Any) -> Any:
        lengths = step.seq_lens_B
        for row in range(len(lengths)):
            if lengths[row] >= at_length and _begins(group, step, row, poison):
                raise RankFailure("killed by a request")
        return execute(step)

    group.executor.execute = check


def _begins(group: Any, step: Any, row: int, poison: int) -> bool:
    """Whether the sequence in ``row`` begins with ``poison``; this step may be what writes it."""
    slot = int(step.block_tables_BM[row][0]) * 4
    written = dict(zip(step.slot_mapping_T.tolist(), step.token_ids_T.tolist(), strict=True))
    return bool(written.get(slot, group.executor._slots[slot]) == poison)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "spread"),
    [
        ("in its prompt", True),
        pytest.param("in its prompt", False, marks=pytest.mark.slow),
        pytest.param("behind 25 tokens", True, marks=pytest.mark.slow),
        pytest.param("behind 25 tokens", False, marks=pytest.mark.slow),
    ],
)
async def test_a_poison_request_kills_three_groups_and_nobody_else_fails(
    start_cluster: Any, spread: bool, where: str
) -> None:
    poison = [250, *range(20, 40)]
    at_length = 10 if where == "in its prompt" else len(poison) + 25
    async with start_cluster(
        num_groups=6,
        group_wait_s=30,
        max_num_seqs=128,
        max_num_batched_tokens=256,
        num_blocks=4000,
    ) as cluster:
        groups = list(cluster.groups.values())
        for group in groups:
            group.executor.step_s = 0.005
            make_deadly(group, poison=poison[0], at_length=at_length)
        # All run on one group, and so when it dies.
        cluster.connections.set_addresses([groups[0].address])
        calls = [
            generate(cluster, prompt_of(n), seed=n, max_tokens=120) for n in range(NUM_INNOCENTS)
        ]
        chunks = [[await anext(aiter(call))] for call in calls]
        poisoned = generate(cluster, poison, seed=1, max_tokens=100)
        reads = [asyncio.create_task(tokens_of(*each)) for each in zip(calls, chunks, strict=True)]
        reading = asyncio.create_task(tokens_of(poisoned, []))
        if spread:
            await groups[0].engine_loop.failed
            cluster.connections.set_addresses([group.address for group in groups])
        else:  # All other requests follow the poison.
            for dying, following in itertools.pairwise(groups[:4]):
                await dying.engine_loop.failed
                cluster.connections.set_addresses([following.address])
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reading
        found = await asyncio.gather(*reads)
        num_dead = sum(group.engine_loop.failed.done() for group in groups)
        assert cluster.gateway.telemetry.quarantined._value.get() == 1
    assert num_dead == MAX_GROUP_DEATHS
    assert raised.value.code() == grpc.StatusCode.ABORTED
    assert "quarantined: 3 replica groups died" in (raised.value.details() or "")
    assert "killed by a request" in (raised.value.details() or "")
    for number, tokens in enumerate(found):
        expected = cluster.model.continuation(prompt_of(number), seed=number, max_tokens=120)
        assert tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
async def test_completions_of_one_prompt_are_one_poison(start_cluster: Any, at_once: int) -> None:
    """Four completions, on two groups that die one after the other or at once."""
    poison = [250, *range(20, 40)]
    async with start_cluster(num_groups=8, group_wait_s=30) as cluster:
        groups = list(cluster.groups.values())
        for group in groups:
            group.executor.step_s = 0.005
            make_deadly(group, poison=poison[0], at_length=10)
        cluster.connections.set_addresses([group.address for group in groups[:at_once]])
        params = pb.SamplingParams(seed=1, max_tokens=20, ignore_eos=True, n=4)
        call = cluster.inference.Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=poison), sampling=params)
        )
        reading = asyncio.create_task(tokens_of(call, []))
        await groups[0].engine_loop.failed
        cluster.connections.set_addresses([groups[1].address])
        await groups[1].engine_loop.failed
        cluster.connections.set_addresses([group.address for group in groups])
        with pytest.raises(grpc.aio.AioRpcError, match="quarantined: 3 replica groups died"):
            await reading
        while cluster.gateway.num_inflight:
            await asyncio.sleep(0.01)
        assert cluster.gateway.telemetry.quarantined._value.get() == 1
        assert cluster.gateway.pipeline.isolate.isolation.num_completions == 0
        num_dead = sum(group.engine_loop.failed.done() for group in groups)
    assert num_dead == MAX_GROUP_DEATHS


@pytest.mark.slow
async def test_an_isolated_request_is_not_convicted_of_what_a_second_poison_did(
    start_cluster: Any,
) -> None:
    """Two groups crash under it; the third is killed by a request sent there afresh."""
    poison = [250, *range(20, 40)]
    async with start_cluster(num_groups=7, group_wait_s=30) as cluster:
        groups = list(cluster.groups.values())
        for group in groups:
            make_deadly(group, poison=poison[0], at_length=10)
            group.executor.step_s = 0.005
        cluster.connections.set_addresses([groups[0].address])
        call = generate(cluster, prompt_of(1), seed=1, max_tokens=100)
        reading = asyncio.create_task(tokens_of(call, [await anext(aiter(call))]))
        groups[2].executor.step_s = 0.2
        for dying, following in itertools.pairwise(groups[:3]):
            while not dying.executor.num_steps:
                await asyncio.sleep(0.001)
            dying.executor.fails = True
            await dying.engine_loop.failed
            cluster.connections.set_addresses([following.address])
        while not groups[2].executor.num_steps:
            await asyncio.sleep(0.001)
        assert cluster.gateway.pipeline.isolate.isolation.num_completions == 1
        poisoned = asyncio.create_task(
            tokens_of(generate(cluster, poison, seed=2, max_tokens=100), [])
        )
        await groups[2].engine_loop.failed
        cluster.connections.set_addresses([group.address for group in groups])
        with pytest.raises(grpc.aio.AioRpcError, match="quarantined: 3 replica groups died"):
            await poisoned
        assert await reading == cluster.model.continuation(prompt_of(1), seed=1, max_tokens=100)
        num_dead = sum(group.engine_loop.failed.done() for group in groups)
        assert cluster.gateway.telemetry.quarantined._value.get() == 1
    assert num_dead == 2 + MAX_GROUP_DEATHS


@pytest.mark.slow
async def test_a_quarantined_request_over_http_is_an_error_that_is_not_retried(
    start_cluster: Any,
) -> None:
    poison = [250, *range(20, 40)]
    async with start_cluster(num_groups=5) as cluster:
        for group in cluster.groups.values():
            make_deadly(group, poison=poison[0], at_length=10)
        client = cluster.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError, match="quarantined: 3") as raised:
            await client.completions.create(model="hash", prompt=poison, max_tokens=5)
        num_dead = sum(group.engine_loop.failed.done() for group in cluster.groups.values())
    assert num_dead == MAX_GROUP_DEATHS, "the client did not send it again"
    assert raised.value.code == "quarantined"


def isolated(name: str) -> group_pb2.GroupCommand:
    return group_pb2.GroupCommand(
        submit=group_pb2.Submit(
            request_id=name,
            attempt=3,
            work=work_of(prepared("", prompt_of(0), seed=1, max_tokens=300, ignore_eos=True)),
            isolated_tokens=8,
        )
    )


async def read_tokens(call: Any, name: str, *, num_tokens: int) -> group_pb2.GroupError.Code:
    """Reads until a request has ``num_tokens`` more, or is refused; returns the refusal's code."""
    num = 0
    while num < num_tokens:
        for delta in (await call.read()).deltas:
            if delta.request_id == name and delta.HasField("error"):
                code: group_pb2.GroupError.Code = delta.error.code
                return code
            num += len(delta.token_ids) if delta.request_id == name else 0
    return group_pb2.GroupError.CODE_UNSPECIFIED


@contextlib.contextmanager
def steps_of(group: Any, num_steps: int) -> Iterator[None]:
    """Within the block, ``group`` runs only ``num_steps`` steps."""
    allowed, is_over = threading.Semaphore(num_steps), threading.Event()
    execute = group.executor.execute

    def wait(step: Any) -> Any:
        if not is_over.is_set():
            allowed.acquire()
        return execute(step)

    group.executor.execute = wait
    try:
        yield
    finally:
        is_over.set()
        allowed.release()


@pytest.mark.parametrize("end", ["cleared", "aborted", "gateway gone"])
async def test_a_group_runs_one_isolated_request_at_a_time_of_all_gateways(
    start_group: Any, end: str
) -> None:
    refused, taken = group_pb2.GroupError.OTHER_ISOLATED, group_pb2.GroupError.CODE_UNSPECIFIED
    async with start_group() as group, grpc.aio.insecure_channel(group.address) as channel:
        stub = group_pb2_grpc.ReplicaGroupStub(channel)
        first, second = stub.Attach(), stub.Attach()
        with steps_of(group, 1):
            await first.write(isolated("a"))
            assert await read_tokens(first, "a", num_tokens=1) == taken
            await second.write(isolated("b"))
            assert await read_tokens(second, "b", num_tokens=1) == refused
        if end == "cleared":
            assert await read_tokens(first, "a", num_tokens=7) == taken
        elif end == "aborted":
            abort = group_pb2.Abort(request_id="a", attempt=3)
            await first.write(group_pb2.GroupCommand(abort=abort))
            await group.settle()
        else:
            first.cancel()
            await group.settle()
        for number in itertools.count():  # The group learns of the end after a delay.
            await second.write(isolated(f"c{number}"))
            if await read_tokens(second, f"c{number}", num_tokens=1) == taken:
                return
