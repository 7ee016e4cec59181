"""Tenants' limits: their effect on clients over every protocol, and the metrics."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, RateLimitError

from quire.cluster.edge.auth import ApiKeys
from quire.cluster.errors import Overloaded, RateLimited
from quire.cluster.features.tenants.limits import TenantPolicy, Tenants, duration
from quire.cluster.features.tenants.usage import NUM_MINUTES, Counts, UsageLedger
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import admin_pb2, admin_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import InvalidRequest

pytestmark = pytest.mark.anyio

PROMPT = list(range(40, 60))
TENANTS = {
    "free": "{}",
    "few": "{requests_per_minute: 2}",
    "short": "{tokens_per_minute: 30}",
    "narrow": "{max_concurrent: 1}",
    "low": "{min_priority: 5, max_priority: 9}",
    "boss": "{operator: true}",
}


def write(path: Path, tenants: dict[str, str], *, revoked: str = "") -> None:
    """Writes a keys file with one key for each tenant, ``<tenant>-key``."""
    lines = ["tenants:", *(f"  {name}: {policy}" for name, policy in tenants.items()), "keys:"]
    for name in tenants:
        hashed = hashlib.sha256(f"{name}-key".encode()).hexdigest()
        if name != revoked:
            lines.append(f'  - {{name: {name}-1, tenant: {name}, hash: "sha256:{hashed}"}}')
    path.write_text("\n".join(lines))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "keys", TENANTS)
    return tmp_path / "keys"


@pytest.fixture
def keys(path: Path) -> ApiKeys:
    return ApiKeys.load(path)


@pytest.fixture
async def cluster(start_cluster: Any, keys: ApiKeys) -> AsyncIterator[Any]:
    async with start_cluster(num_groups=1, keys=keys) as cluster:
        yield cluster


async def ask(cluster: Any, tenant: str, path: str = "/v1/completions", **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **more}
    async with httpx.AsyncClient(timeout=None, headers={"x-api-key": f"{tenant}-key"}) as client:
        return await client.post(f"{cluster.http_url}{path}", json=body)


async def generate(
    cluster: Any, metadata: dict[str, str], **more: Any
) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **more)
    request.sampling.max_tokens = 4
    call = cluster.inference.Generate(request, metadata=tuple(metadata.items()))
    return [chunk async for chunk in call]


async def refusal(cluster: Any, tenant: str, **more: Any) -> tuple[Any, ErrorInfo, RetryInfo]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(cluster, {"x-api-key": f"{tenant}-key"}, **more)
    found: list[Any] = [ErrorInfo(), RetryInfo()]
    status: Any = rpc_status.from_call(raised.value)
    for detail in status.details:
        for message in found:
            detail.Unpack(message)
    return raised.value, found[0], found[1]


async def metrics(cluster: Any) -> str:
    async with httpx.AsyncClient(headers={"x-api-key": "boss-key"}) as client:
        return (await client.get(f"{cluster.http_url}/metrics")).text


async def refused(cluster: Any, reason: str) -> float:
    page = await metrics(cluster)
    found = re.search(rf'quire_refused_total\{{.*reason="{reason}".*\}} (.*)', page)
    return float(found[1]) if found else 0.0


async def test_requests_per_minute(cluster: Any) -> None:
    left = []
    for _ in range(2):
        answer = await ask(cluster, "few")
        assert answer.status_code == 200, answer.text
        left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert re.fullmatch(r"(\d+m)?[\d.]+m?s", answer.headers["x-ratelimit-reset-requests"])
        assert "x-ratelimit-limit-tokens" not in answer.headers
    assert left == ["1", "0"]
    answer = await ask(cluster, "few")
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert 20 <= int(answer.headers["retry-after"]) <= 30
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await ask(cluster, "free")).status_code == 200, "others are not concerned"
    error, info, retry = await refusal(cluster, "few")
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert info.reason == "RATE_LIMIT_EXCEEDED"
    assert 20 <= retry.retry_delay.seconds <= 30
    assert await refused(cluster, "tenant_requests") == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_per_minute_count_prompts_and_outputs(cluster: Any, is_stream: bool) -> None:
    answer = await ask(cluster, "short", stream=is_stream)
    assert answer.status_code == 200
    # A stream's headers are sent before its tokens.
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(8, abs=2)
    answer = await ask(cluster, "short")
    assert answer.status_code == 200, "one begins while any are left"
    answer = await ask(cluster, "short")
    assert answer.status_code == 429
    assert "30 tokens per minute" in answer.json()["error"]["message"]
    # 48 of 30 tokens were used, and one is added every two seconds.
    assert 30 <= int(answer.headers["retry-after"]) <= 40


async def test_an_openai_client_knows_the_refusal(cluster: Any) -> None:
    url = f"{cluster.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="few-key", max_retries=0) as client:
        for _ in range(2):
            await client.completions.create(model="hash", prompt="hello", max_tokens=1)
        with pytest.raises(RateLimitError) as raised:
            await client.completions.create(model="hash", prompt="hello", max_tokens=1)
    assert raised.value.code == "rate_limit_exceeded"


async def test_completions_at_a_time(cluster: Any) -> None:
    answer = await ask(cluster, "narrow", n=2)
    assert answer.status_code == 400
    assert "may have 1 under way" in answer.json()["error"]["message"]
    both = await asyncio.gather(*(ask(cluster, "narrow", max_tokens=200) for _ in range(2)))
    assert sorted(each.status_code for each in both) == [200, 429]
    assert (await ask(cluster, "narrow")).status_code == 200, "the first has ended"
    assert await refused(cluster, "tenant_concurrency") == 1


async def test_a_priority_that_is_not_the_tenants_is_refused(cluster: Any) -> None:
    for priority in (-1, 4, 10):
        answer = await ask(cluster, "low", priority=priority)
        assert answer.status_code == 400
        assert "5 to 9 are" in answer.json()["error"]["message"]
    for priority in (0, 5, 9):
        assert (await ask(cluster, "low", priority=priority)).status_code == 200
    error, _, _ = await refusal(cluster, "low", priority=4)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
async def test_the_last_place_under_way_is_for_the_tenant_with_less_waiting(
    start_cluster: Any, keys: ApiKeys
) -> None:
    admission = AdmissionConfig(max_inflight=4)
    async with start_cluster(
        num_groups=1,
        max_num_seqs=1,
        description={"max_num_seqs": 1},
        config={"admission": admission},
        keys=keys,
    ) as cluster:
        cluster.take_steps_of(0.01)
        greedy = [asyncio.create_task(ask(cluster, "free", max_tokens=50)) for _ in range(4)]
        while cluster.gateway.num_inflight < 4:
            await asyncio.sleep(0.01)
        thin = await ask(cluster, "few")
        codes = sorted([(await each).status_code for each in greedy])
        assert thin.status_code == 200, thin.text
        assert codes == [200, 200, 200, 429]
        assert cluster.gateway.num_inflight == 0
        assert await refused(cluster, "displaced") == 1


async def test_embeddings_and_chats_are_limited_too(cluster: Any) -> None:
    for _ in range(2):
        assert (await ask(cluster, "few")).status_code == 200
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "hash", "max_tokens": 2}
    async with httpx.AsyncClient(headers={"x-api-key": "few-key"}) as client:
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = await client.post(f"{cluster.http_url}{path}", json=chat)
            assert answer.status_code == 429, answer.text
        answer = await client.post(f"{cluster.http_url}/v1/embeddings", json={"input": "hi"})
        assert answer.status_code == 429, answer.text


@pytest.mark.parametrize(
    "metadata", [{"x-api-key": "free-key"}, {"authorization": "Bearer free-key"}]
)
async def test_a_key_is_shown_over_grpc_in_either_way(
    cluster: Any, metadata: dict[str, str]
) -> None:
    assert await generate(cluster, metadata)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(cluster, {name: f"{value}-not" for name, value in metadata.items()})
    assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_new_limits_and_keys_hold_without_a_restart(
    cluster: Any, path: Path, keys: ApiKeys
) -> None:
    assert (await ask(cluster, "free")).status_code == 200
    running = asyncio.create_task(ask(cluster, "free", max_tokens=300))
    await asyncio.sleep(0.05)
    write(path, TENANTS | {"few": "{requests_per_minute: 100}", "new": "{}"}, revoked="free")
    await keys.look()
    assert (await ask(cluster, "free")).status_code == 401
    assert (await ask(cluster, "new")).status_code == 200
    assert (await ask(cluster, "few")).headers["x-ratelimit-limit-requests"] == "100"
    answer = await running
    assert answer.status_code == 200, "what runs goes on to its end"
    assert answer.json()["usage"]["completion_tokens"] == 300


TEXT_CALLS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a b c"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("call", TEXT_CALLS)
async def test_calls_that_use_no_group_are_limited_and_counted(cluster: Any, call: str) -> None:
    headers = {"authorization": "Bearer few-key"}
    url = f"{cluster.http_url}{call}"
    async with httpx.AsyncClient(timeout=None, headers=headers) as client:
        answers = [await client.post(url, json=TEXT_CALLS[call]) for _ in range(3)]
        assert [each.status_code for each in answers] == [200, 200, 429], answers[0].text
        tokenize = pb.TokenizeRequest(text="a")
        with pytest.raises(grpc.aio.AioRpcError, match="used up its 2 requests"):
            await cluster.inference.Tokenize(tokenize, metadata=tuple(headers.items()))
        (row,) = (await client.get(f"{cluster.http_url}/v1/usage")).json()["data"]
    assert (row["requests"], row["prompt_tokens"], row["output_tokens"]) == (2, 0, 0)


async def usage(cluster: Any, tenant: str, query: str = "") -> Any:
    async with httpx.AsyncClient(headers={"x-api-key": f"{tenant}-key"}) as client:
        return await client.get(f"{cluster.http_url}/v1/usage{query}")


async def test_usage_is_told_to_its_tenant_and_to_operators(cluster: Any) -> None:
    for _ in range(2):
        assert (await ask(cluster, "free")).status_code == 200
    await generate(cluster, {"x-api-key": "low-key"})
    expected: dict[str, Any] = {
        "tenant": "free",
        "key": "free-1",
        "requests": 2,
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "output_tokens": 8,
    }
    answer = (await usage(cluster, "free")).json()
    (row,) = answer["data"]
    (*_, minute) = row["minutes"]
    assert {name: row[name] for name in expected} == expected
    assert sum(each["requests"] for each in row["minutes"]) == 2
    assert minute["start"] % 60 == 0
    assert (await usage(cluster, "free", "?tenant=free")).json()["data"] == answer["data"]
    refusal = await usage(cluster, "free", "?tenant=low")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "not_an_operator")
    assert (await usage(cluster, "free", "?key=x")).status_code == 400
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        question = admin_pb2.UsageRequest(tenant="free")
        told = await admin.Usage(question, metadata=(("x-api-key", "boss-key"),))
    assert {name: getattr(told.data[0], name) for name in expected} == expected
    assert [each.start for each in told.data[0].minutes] == [m["start"] for m in row["minutes"]]
    rows = (await usage(cluster, "boss")).json()["data"]
    assert [row["tenant"] for row in rows] == ["free", "low"]
    page = await metrics(cluster)
    for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens"):
        labels = '{key="free-1",tenant="free"}'
        assert f"quire_usage_{name}_total{labels} {expected[name]:.1f}" in page
    (row,) = (await usage(cluster, "boss", "?tenant=low")).json()["data"]
    assert (row["key"], row["prompt_tokens"], row["output_tokens"]) == ("low-1", 20, 4)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def take(tenants: Tenants, num_prompt_tokens: int = 0, num_completions: int = 1) -> None:
    with tenants.under_way(
        "t", num_completions=num_completions, num_prompt_tokens=num_prompt_tokens
    ):
        pass


@given(
    limit=st.integers(1, 50),
    gaps_s=st.lists(st.floats(0, 40), min_size=1, max_size=60),
    num_gateways=st.integers(1, 3),
)
def test_in_no_minute_are_there_more_than_twice_the_requests(
    limit: int, gaps_s: list[float], num_gateways: int
) -> None:
    """A bucket that is full at the start of a minute admits a minute's worth and refills once."""
    clock = Clock()
    tenants = Tenants(
        {"t": TenantPolicy(requests_per_minute=limit)},
        num_gateways=lambda: num_gateways,
        clock=clock,
    )
    taken_s = []
    for gap_s in gaps_s:
        clock.now_s += gap_s
        try:
            take(tenants)
            taken_s.append(clock.now_s)
        except RateLimited as error:
            clock.now_s += error.retry_after_s + 1e-6
            take(tenants)  # The announced wait was right.
            taken_s.append(clock.now_s)
    for begin_s in taken_s:
        in_minute = sum(begin_s <= each < begin_s + 60 for each in taken_s)
        assert in_minute <= 2 * max(limit / num_gateways, 1) + 1


def test_gateways_grant_their_part_of_a_limit() -> None:
    policies = {"t": TenantPolicy(requests_per_minute=10, max_concurrent=4)}
    tenants = Tenants(policies, num_gateways=lambda: 2, clock=Clock())
    for _ in range(5):
        take(tenants)
    with pytest.raises(RateLimited):
        take(tenants)
    assert tenants.headers("t")["x-ratelimit-remaining-requests"] == "0"
    tenants = Tenants(policies, num_gateways=lambda: 2, clock=Clock())
    with (
        tenants.under_way("t", num_completions=2, num_prompt_tokens=0),
        pytest.raises(RateLimited),
    ):
        take(tenants)
    take(tenants, num_completions=4)
    with pytest.raises(InvalidRequest):
        take(tenants, num_completions=5)


def test_what_is_refused_for_want_of_room_costs_nothing() -> None:
    policies = {"t": TenantPolicy(requests_per_minute=1, tokens_per_minute=10)}
    tenants = Tenants(policies, clock=Clock())
    before = tenants.headers("t")
    with (
        pytest.raises(Overloaded),
        tenants.under_way("t", num_completions=1, num_prompt_tokens=9),
    ):
        raise Overloaded("full", reason="queue_full", retry_after_s=1.0)
    assert tenants.headers("t") == before


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1.5, "1.5s"), (2, "2s"), (360, "6m0s"), (3661, "1h1m1s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_the_usage_of_all_gateways_is_one_sum() -> None:
    clock = Clock()
    first, second = UsageLedger(wall_clock=clock), UsageLedger(wall_clock=clock)
    counts = Counts(requests=1, prompt_tokens=5, cached_tokens=2, output_tokens=3)
    for ledger in (first, second, second):
        ledger.record("a", "k", counts)
    clock.now_s += 120
    second.record("a", "k", counts)
    second.record("b", "", counts)

    async def ask_others(tenant: str | None) -> Any:
        return [await second.own(tenant)], "1 of 2 other gateways did not answer"

    first.ask_others = ask_others
    answer = await first.answer(None)
    assert answer["incomplete"] == "1 of 2 other gateways did not answer"
    a, b = answer["data"]
    assert (a["tenant"], a["requests"], a["prompt_tokens"]) == ("a", 4, 20)
    assert [(each["start"], each["requests"]) for each in a["minutes"]] == [(960, 3), (1080, 1)]
    assert (b["tenant"], b["output_tokens"]) == ("b", 3)
    assert [row["tenant"] for row in (await first.answer("b"))["data"]] == ["b"]


async def test_usage_keeps_an_hour_of_minutes_and_a_bounded_number_of_keys() -> None:
    clock = Clock()
    ledger = UsageLedger(wall_clock=clock)
    for _ in range(200):
        ledger.record("a", "k", Counts(requests=1))
        clock.now_s += 60
    (row,) = (await ledger.own("a"))["data"]
    assert row["requests"] == 200
    assert len(row["minutes"]) <= NUM_MINUTES
    for number in range(5000):
        ledger.record("many", f"{number}", Counts(requests=1))
    rows = (await ledger.own(None))["data"]
    assert len(rows) <= 4097
    assert sum(each["requests"] for each in rows) == 5200
