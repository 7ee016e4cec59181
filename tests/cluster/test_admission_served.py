"""Admission, deadlines and priorities as clients see them, over gRPC and HTTP."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest

from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(20, 41))
PATIENT = AdmissionConfig(max_queue_wait_s=1000)
STRICT = AdmissionConfig(max_queue_wait_s=0, min_queued_per_group=1)


def one_slot(admission: AdmissionConfig = PATIENT) -> dict[str, Any]:
    """A cluster that runs one request at a time."""
    return {
        "num_groups": 1,
        "max_num_seqs": 1,
        "description": {"max_num_seqs": 1},
        "config": {"admission": admission},
    }


def generate(cluster: Any, *, max_tokens: int = 300, priority: int = 0, **options: Any) -> Any:
    params = pb.SamplingParams(seed=5, max_tokens=max_tokens, ignore_eos=True)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), sampling=params, priority=priority
    )
    return cluster.inference.Generate(request, **options)


async def occupy(cluster: Any) -> Any:
    """Occupies the only slot until the returned call ends."""
    cluster.take_steps_of(0.1)
    call = generate(cluster, max_tokens=370)
    await call.read()
    while not cluster.connections.loads["g0"].num_running:
        await asyncio.sleep(0.01)
    return call


async def wait_queued(cluster: Any, num_requests: int) -> None:
    while cluster.gateway.admission.queued.num_requests != num_requests:
        await asyncio.sleep(0.005)


async def drained(call: Any) -> list[int]:
    return [token for chunk in [chunk async for chunk in call] for token in chunk.token_ids]


async def test_past_the_bound_a_request_is_refused_and_told_when_to_come_back(
    start_cluster: Any,
) -> None:
    async with (
        start_cluster(**one_slot(STRICT)) as cluster,
        httpx.AsyncClient(timeout=None) as client,
    ):
        running = await occupy(cluster)
        queued = asyncio.create_task(drained(generate(cluster, max_tokens=3)))
        await wait_queued(cluster, 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(cluster).read()
        answer = await client.post(
            f"{cluster.http_url}/v1/completions", json={"prompt": "x", "stream": True}
        )
        with pytest.raises(openai.RateLimitError) as limited:
            await cluster.openai.completions.create(model="hash", prompt="x")
        metrics = (await client.get(f"{cluster.http_url}/metrics")).text
        running.cancel()
        assert await queued == cluster.model.continuation(PROMPT, seed=5, max_tokens=3)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-queue-wait-s is 0" in (raised.value.details() or "")
    metadata = dict(raised.value.trailing_metadata())
    assert int(metadata["retry-after"]) >= 1
    assert int(metadata["grpc-retry-pushback-ms"]) >= 1000
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == limited.value.code == "overloaded"
    assert 'quire_refused_total{model="hash",reason="wait"} 3.0' in metrics
    assert 'quire_queued_requests{model="hash"} 1.0' in metrics
    assert f'quire_queued_tokens{{model="hash"}} {len(PROMPT)}.0' in metrics
    assert 'quire_queue_wait_seconds_count{model="hash"} 1.0' in metrics


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_whoever_gives_up_in_the_queue_frees_its_place(start_cluster: Any, how: str) -> None:
    async with (
        start_cluster(**one_slot(STRICT)) as cluster,
        httpx.AsyncClient(timeout=None) as client,
    ):
        running = await occupy(cluster)
        if how == "disconnect":
            post = asyncio.create_task(
                client.post(f"{cluster.http_url}/v1/completions", json={"prompt": "x"})
            )
            await wait_queued(cluster, 1)
            post.cancel()
            await asyncio.wait([post])
        else:
            call = generate(cluster)
            await wait_queued(cluster, 1)
            call.cancel()
        await wait_queued(cluster, 0)
        later = asyncio.create_task(drained(generate(cluster, max_tokens=2)))
        await wait_queued(cluster, 1)
        running.cancel()
        assert len(await later) == 2


@pytest.mark.parametrize("how", ["grpc", "http"])
async def test_a_deadline_in_the_queue_ends_the_wait(start_cluster: Any, how: str) -> None:
    async with start_cluster(num_groups=1, group_wait_s=300) as cluster:
        cluster.connections.set_addresses([])  # Without groups no wait can be predicted.
        await cluster.wait_ready(0)
        if how == "grpc":
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await generate(cluster, timeout=0.3).read()
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            with pytest.raises(openai.InternalServerError, match="deadline passed") as late:
                await cluster.openai.completions.create(
                    model="hash", prompt="x", extra_body={"timeout": 0.3}
                )
            assert late.value.status_code == 504
        await wait_queued(cluster, 0)
        assert cluster.connections.demand.num_requests == 0


@pytest.mark.slow
async def test_the_queue_is_served_by_priority_and_the_group_is_told(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_cluster(**one_slot()) as cluster, httpx.AsyncClient(timeout=None) as client:
        begun: list[int] = []
        loop = cluster.groups["g0"].engine_loop
        submit = loop.submit

        def note(request: Any, sink: Any) -> None:
            begun.append(request.priority)
            submit(request, sink)

        monkeypatch.setattr(loop, "submit", note)
        running = await occupy(cluster)
        tasks: list[asyncio.Task[Any]] = []
        for number, priority in enumerate((0, 3, -2, 0)):
            tasks.append(
                asyncio.create_task(drained(generate(cluster, max_tokens=2, priority=priority)))
            )
            await wait_queued(cluster, number + 1)
        body = {"prompt": PROMPT, "priority": -7, "max_tokens": 2}
        tasks.append(
            asyncio.create_task(client.post(f"{cluster.http_url}/v1/completions", json=body))
        )
        await wait_queued(cluster, 5)
        running.cancel()
        await asyncio.gather(*tasks)
    assert begun == [0, -7, -2, 0, 0, 3]


async def test_a_displaced_request_is_told(start_cluster: Any) -> None:
    admission = AdmissionConfig(max_queue_wait_s=1000, max_queued_requests=1)
    async with start_cluster(**one_slot(admission)) as cluster:
        running = await occupy(cluster)
        low = asyncio.create_task(drained(generate(cluster, priority=1)))
        await wait_queued(cluster, 1)
        high = asyncio.create_task(drained(generate(cluster, max_tokens=2)))
        with pytest.raises(grpc.aio.AioRpcError, match="higher priority than 1") as raised:
            await low
        running.cancel()
        assert len(await high) == 2
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("where", ["header", "body", "both"])
async def test_a_deadline_ends_an_answer_with_what_there_is_of_it(
    start_cluster: Any, where: str
) -> None:
    async with start_cluster(**one_slot()) as cluster, httpx.AsyncClient(timeout=None) as client:
        group = cluster.groups["g0"]
        cluster.take_steps_of(0.1)
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 370, "ignore_eos": True, "seed": 5}
        if where != "header":
            body["timeout"] = 400
        timeouts = {"header": "400", "both": "50000"}
        headers = {"X-Request-Timeout": timeouts[where]} if where in timeouts else {}
        answering = asyncio.create_task(
            client.post(
                f"{cluster.http_url}/v1/completions", json=body, headers=headers, timeout=600
            )
        )
        while cluster.connections.loads["g0"].num_output_tokens < 5:
            await asyncio.sleep(0.01)
        cluster.clock.ahead_s = 1000
        answer = await answering
        await group.settle()
        assert group.engine_loop.num_requests == 0
        assert group.executor.num_steps < 370
        whole = cluster.model.continuation(PROMPT, seed=5, max_tokens=370)
        text = cluster.model.tokenizer.decode(whole)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] is None
    assert 0 < len(choice["text"]) < len(text)
    assert text.startswith(choice["text"])


async def test_a_stream_past_its_deadline_ends_with_an_error(start_cluster: Any) -> None:
    async with start_cluster(**one_slot()) as cluster:
        cluster.take_steps_of(0.1)
        stream = await cluster.openai.completions.create(
            model="hash",
            prompt=PROMPT,
            max_tokens=370,
            stream=True,
            n=2,
            extra_body={"ignore_eos": True, "timeout": 400},
        )
        cluster.clock.ahead_s = 1000
        with pytest.raises(openai.APIError, match="deadline passed"):
            async for _ in stream:
                pass
        await cluster.groups["g0"].settle()


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(start_cluster: Any) -> None:
    async with start_cluster(**one_slot()) as cluster:
        running = await occupy(cluster)
        queued = [generate(cluster) for _ in range(20)]
        await wait_queued(cluster, 20)
        with pytest.raises(grpc.aio.AioRpcError, match="after its deadline") as raised:
            await generate(cluster, timeout=20).read()
        for call in (*queued, running):
            call.cancel()
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        ({"timeout": 0}, {}, "timeout=0.0 is out of range"),
        ({"timeout": -1.5}, {}, "timeout=-1.5"),
        ({}, {"X-Request-Timeout": "soon"}, "X-Request-Timeout='soon': must be a number"),
        ({}, {"X-Request-Timeout": "nan"}, "timeout=nan"),
        ({"priority": 2**31}, {}, "priority=2147483648"),
    ],
)
async def test_bad_deadlines_and_priorities_are_refused(
    start_cluster: Any, body: dict[str, Any], headers: dict[str, str], words: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(
            f"{cluster.http_url}/v1/completions", json={"prompt": "x", **body}, headers=headers
        )
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_demand_without_a_group_is_told_and_served_when_one_comes(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1, group_wait_s=30) as cluster:
        address = cluster.groups["g0"].address
        cluster.connections.set_addresses([])
        await cluster.wait_ready(0)
        calls = [asyncio.create_task(drained(generate(cluster, max_tokens=3))) for _ in range(2)]
        await wait_queued(cluster, 2)
        demand = cluster.connections.demand
        assert (demand.num_requests, demand.num_tokens) == (2, 2 * len(PROMPT))
        cluster.connections.set_addresses([address])
        for call in calls:
            assert await call == cluster.model.continuation(PROMPT, seed=5, max_tokens=3)
        assert (demand.num_requests, demand.num_tokens) == (0, 0)


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_a_hundred_that_go_away_leave_nothing_behind(start_cluster: Any, how: str) -> None:
    options: dict[str, Any] = {
        "description": {"max_num_seqs": 16},
        "config": {"admission": PATIENT},
    }
    async with start_cluster(**options) as cluster, httpx.AsyncClient(timeout=None) as client:
        # Slow steps: none ends before all have begun.
        cluster.take_steps_of(0.005 if how == "deadline" else 0.1)

        async def post() -> None:
            body = {"prompt": PROMPT, "max_tokens": 370, "ignore_eos": True}
            await client.post(f"{cluster.http_url}/v1/completions", json=body, timeout=600)

        async def call() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await drained(generate(cluster, timeout=1.0 if how == "deadline" else None))

        work = post if how == "disconnect" else call
        tasks = [asyncio.create_task(work()) for _ in range(100)]
        if how != "deadline":
            while cluster.gateway.num_inflight < 100:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            cluster.take_steps_of(0.005)
        await asyncio.wait(tasks)
        while await what_is_left(cluster) != NOTHING:
            await asyncio.sleep(0.01)


NOTHING = [0, (0, 0), 0, 0, 0, 0, 0]


async def what_is_left(cluster: Any) -> list[Any]:
    """Counts of requests left over in each part of the cluster."""
    for group in cluster.groups.values():
        await group.settle()
    routing = cluster.table.stats()
    return [
        cluster.gateway.num_inflight,
        cluster.gateway.admission.queued,
        cluster.connections.demand.num_requests,
        routing.num_in_flight,
        routing.num_reserved_tokens,
        *(group.engine_loop.num_requests for group in cluster.groups.values()),
    ]
