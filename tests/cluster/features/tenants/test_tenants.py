"""Tenant isolation: clients with keys of different tenants learn nothing of each other."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.edge.auth import ApiKeys
from quire.cluster.features.explain.explanations import routing_message
from quire.router.policies.policy import Decision, GroupState
from quire.router.prefix_index.directory import GroupId
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import ConfigError
from quire.worker.request.request import Request, Text, Tokens
from quire.worker.request.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio

PROMPT = list(range(40, 60))
KEYS = """\
# one key a line
alone
acme-1 acme
acme-2 acme
other-1 other
boss *
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


@pytest.fixture
async def cluster(start_cluster: Any, keys_file: Path) -> AsyncIterator[Any]:
    async with start_cluster(num_groups=1, keys=ApiKeys.load(keys_file)) as cluster:
        yield cluster


def shown(key: str, name: str = "") -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **({"x-request-id": name} if name else {})}


async def over_grpc(cluster: Any, key: str, *, salt: str = "", name: str = "") -> pb.Start:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), cache_salt=salt)
    request.sampling.max_tokens = 2
    call = cluster.inference.Generate(request, metadata=tuple(shown(key, name).items()))
    chunks = [chunk async for chunk in call]
    start: pb.Start = chunks[0].start
    return start


async def over_http(cluster: Any, key: str, *, salt: str = "") -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 2, **({"cache_salt": salt} if salt else {})}
    async with httpx.AsyncClient(timeout=None, headers=shown(key)) as client:
        answer = await client.post(f"{cluster.http_url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def cached(cluster: Any, key: str, how: str, **options: Any) -> int:
    """Prompt tokens that one request with ``key`` found in the cache."""
    if how == "grpc":
        return (await over_grpc(cluster, key, **options)).num_cached_tokens
    usage = (await over_http(cluster, key, **options))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def decisions(cluster: Any, key: str, **question: Any) -> list[pb.RoutingDecision]:
    answer = await cluster.inference.ExplainRouting(
        pb.ExplainRoutingRequest(**question), metadata=tuple(shown(key).items())
    )
    return list(answer.decisions)


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("how", ["grpc", "http"])
async def test_a_prompt_that_another_tenant_sent_is_not_cached(cluster: Any, how: str) -> None:
    assert await cached(cluster, "acme-1", how) == 0
    assert await cached(cluster, "acme-1", how) == 16
    assert await cached(cluster, "acme-2", how) == 16, "keys of one tenant share"
    for other in ("other-1", "alone", "boss"):
        assert await cached(cluster, other, how) == 0
    for guess in ("acme", "acme/", "/acme", '["acme", ""]'):
        assert await cached(cluster, "other-1", how, salt=guess) == 0
    assert await cached(cluster, "acme-1", how, salt="mine") == 0
    assert await cached(cluster, "acme-2", how, salt="mine") == 16


@given(st.data())
def test_no_two_tenants_have_a_salt_in_common(data: st.DataObject) -> None:
    tenants = st.from_regex(r"#?[A-Za-z0-9._-]{1,4}", fullmatch=True)
    salts = st.text(st.sampled_from("/#a.\0"), max_size=4)
    pairs = [data.draw(st.tuples(tenants, salts)) for _ in range(2)]
    first, second = (
        Request(prompt=(Text("x"),), sampling=SamplingParams(), tenant=tenant, cache_salt=salt).salt
        for tenant, salt in pairs
    )
    assert (first == second) == (pairs[0] == pairs[1])


def test_without_tenants_the_salt_is_the_clients() -> None:
    request = Request(prompt=(Text("x"),), sampling=SamplingParams(), cache_salt="mine")
    assert request.salt == "mine"


async def test_decisions_are_told_to_their_tenant_alone(cluster: Any) -> None:
    mine = (await over_grpc(cluster, "acme-1", name="same name")).request_id
    theirs = (await over_grpc(cluster, "other-1", name="same name")).request_id
    for key, seen in (("acme-1", [mine]), ("acme-2", [mine]), ("other-1", [theirs]), ("alone", [])):
        assert [each.request_id for each in await decisions(cluster, key)] == seen
    for key, name, seen in (
        ("acme-2", "same name", [mine]),
        ("other-1", "same name", [theirs]),
        ("acme-2", mine, [mine]),
        ("boss", theirs, [theirs]),
        ("boss", "same name", [mine, theirs]),
    ):
        found = await decisions(cluster, key, request_id=name)
        assert [each.request_id for each in found] == seen
    for key, name in (("acme-1", theirs), ("other-1", mine), ("alone", "same name")):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await decisions(cluster, key, request_id=name)
        assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    (first, second) = await decisions(cluster, "boss")
    assert (first.tenant, second.tenant) == ("other", "acme")


async def test_decisions_are_told_to_their_tenant_alone_over_http(cluster: Any) -> None:
    mine = (await over_http(cluster, "acme-1"))["id"]
    url = f"{cluster.http_url}/v1/routing/decisions"
    async with httpx.AsyncClient(timeout=None) as client:

        async def seen(key: str, query: str = "") -> Any:
            return (await client.get(url + query, headers=shown(key))).json()

        for key, number in (("acme-2", 1), ("boss", 1), ("other-1", 0), ("alone", 0)):
            assert len((await seen(key))["data"]) == number
        assert (await seen("other-1", f"?request_id={mine}"))["error"]["code"]
        assert (await seen("acme-2", f"?request_id={mine}"))["data"][0]["tenant"] == "acme"


async def test_a_tenant_learns_nothing_of_the_load_that_others_cause(cluster: Any) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(max_tokens=1),
        explain_routing=True,
    )
    loads = ("cost", "num_queued_tokens", "num_sequences")
    for key, is_told in (("acme-1", False), ("boss", True)):
        metadata = tuple(shown(key).items())
        chunks = [each async for each in cluster.inference.Generate(request, metadata=metadata)]
        (kept, *_) = await decisions(cluster, key)
        for routing in (chunks[0].start.routing, kept.routing):
            assert routing.candidates
            for each in routing.candidates:
                assert {each.HasField(name) for name in loads} == {is_told}
        async with httpx.AsyncClient(timeout=None, headers=shown(key)) as client:
            load = await client.get(f"{cluster.http_url}/load")
            assert load.status_code == (200 if is_told else 403)
            (told, *_) = (await client.get(f"{cluster.http_url}/v1/routing/decisions")).json()[
                "data"
            ]
        assert {name in told["routing"]["candidates"][0] for name in loads} == {is_told}


def test_forecasts_and_pressure_are_for_operators() -> None:
    """Both follow from the groups' loads."""
    state = GroupState(group=GroupId("a"), num_pending_prefill_tokens=500)
    decision = Decision(
        group=GroupId("a"),
        reason="only_group",
        predicted_cached_tokens=0,
        num_prompt_tokens=2,
        groups=[state],
        index=0,
        forecast_s=1.5,
        cached=np.zeros(1),
        costs=np.ones(1),
    )
    told = routing_message(decision, with_candidates=True, with_loads=True)
    hidden = routing_message(decision, with_candidates=True, with_loads=False)
    assert told.forecast_s == 1.5
    assert told.candidates[0].num_queued_tokens == 500
    assert {field.name for field, _ in hidden.ListFields()} == {"group", "reason", "candidates"}
    fields = {field.name for field, _ in hidden.candidates[0].ListFields()}
    assert fields == {"group", "num_prefill_tokens"}


def test_a_key_belongs_to_the_tenant_of_its_line(keys_file: Path) -> None:
    keys = ApiKeys.load(keys_file)
    callers = {
        key: keys.caller(f"Bearer {key}")
        for key in ("alone", "acme-1", "acme-2", "other-1", "boss", "nobody", "*", "acme")
    }
    found = {key: caller for key, caller in callers.items() if caller}
    assert set(found) == {"alone", "acme-1", "acme-2", "other-1", "boss"}
    assert found["acme-1"] == found["acme-2"]
    assert [key for key, caller in found.items() if caller.is_operator] == ["boss"]
    assert len({caller.tenant for caller in found.values()}) == 4
    for key in ("alone", "boss"):
        assert key not in found[key].tenant
        assert "/" not in found[key].tenant


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("good\nse-cret a b", "line 2: must be KEY, KEY TENANT or KEY \\*"),
        ("se-cret a/b", "line 1: must be"),
        ("se-cret #x", "line 1: must be"),
        ("se-cret a\n\nse-cret b", "line 3: an earlier line has this key"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_not_shown(
    tmp_path: Path, lines: str, message: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(lines)
    with pytest.raises(ConfigError, match=message) as raised:
        ApiKeys.load(path)
    assert "se-cret" not in str(raised.value)


async def test_a_gateway_names_blocks_as_groups_do_which_get_the_salt_alone(cluster: Any) -> None:
    params = SamplingParams(max_tokens=1)
    request = Request(prompt=(Tokens(PROMPT),), sampling=params, tenant="acme", cache_salt="mine")
    prepared = await cluster.gateway.prepare(request)
    assert prepared.hashes == cluster.gateway.hash_prompt(PROMPT, prepared.cache_salt)
    assert prepared.hashes != cluster.gateway.hash_prompt(PROMPT, "mine")
