"""Explanations of routing decisions, as clients and operators request them."""

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest

from quire.cluster.cli import main as cli
from quire.router.decision_log import Explanation
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

PROMPT = list(range(40, 60))


def request(**options: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(**options)
    message.token_ids.ids.extend(PROMPT)
    message.sampling.max_tokens = message.sampling.max_tokens or 4
    message.sampling.ignore_eos = True
    return message


async def explain(cluster: Any, **question: Any) -> list[pb.RoutingDecision]:
    answer = await cluster.inference.ExplainRouting(pb.ExplainRoutingRequest(**question))
    return list(answer.decisions)


async def complete(cluster: Any, **options: Any) -> dict[str, Any]:
    """Sends a completion over HTTP. ``options`` may have ``headers``; its id is in the answer."""
    headers = options.pop("headers", None)
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(
            f"{cluster.http_url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, **options},
            headers=headers,
        )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def decisions(cluster: Any, query: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=None) as client:
        return await client.get(f"{cluster.http_url}/v1/routing/decisions{query}")


async def test_a_completion_is_explained_by_the_id_that_its_client_saw(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        chunks = await cluster.inference.Generate(
            request(), metadata=[("x-request-id", "me")]
        ).read()
        start = chunks.start
        (found,) = await explain(cluster, request_id=start.request_id)
        by_client = await explain(cluster, request_id="me")
    assert found.request_id == start.request_id
    assert found.client_id == "me"
    assert by_client[0].request_id == found.request_id
    assert (found.attempt, found.num_prompt_tokens) == (1, 20)
    assert found.routing.group == start.routing.group
    assert found.routing.reason == start.routing.reason
    assert found.policy == "prefix_aware"
    assert found.HasField("pressure")
    assert found.num_cached_tokens == start.num_cached_tokens
    assert found.waited_s > 0
    assert {candidate.group for candidate in found.routing.candidates} == {"g0", "g1"}
    for candidate in found.routing.candidates:
        assert candidate.num_cached_tokens + candidate.num_prefill_tokens == 20
        assert candidate.cost > 0


async def test_candidates_come_with_the_answer_only_where_they_are_asked_for(
    start_cluster: Any,
) -> None:
    async with start_cluster() as cluster:
        plain = await cluster.inference.Generate(request()).read()
        told = await cluster.inference.Generate(request(explain_routing=True)).read()
        (logged,) = await explain(cluster, request_id=told.start.request_id)
    assert not plain.start.routing.candidates
    assert len(told.start.routing.candidates) == 2
    assert told.start.routing == logged.routing


async def test_every_completion_of_a_request_is_found_by_the_requests_id(
    start_cluster: Any,
) -> None:
    async with start_cluster() as cluster:
        answer = await complete(
            cluster, n=2, prompt=["the cat", "the mat"], headers={"X-Request-Id": "two of two"}
        )
        by_answer = (await decisions(cluster, f"?request_id={answer['id']}")).json()["data"]
        by_client = (await decisions(cluster, "?request_id=two of two")).json()["data"]
    # An answer has the id of its first prompt.
    name = answer["id"].removeprefix("cmpl-")
    assert [each["request_id"] for each in by_answer] == [f"{name}-0", f"{name}-1"]
    assert len(by_client) == 4
    assert {each["client_id"] for each in by_client} == {"two of two"}


async def test_the_last_decisions_come_newest_first(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        names = [(await complete(cluster))["id"].removeprefix("cmpl-") + "-0" for _ in range(3)]
        for group in cluster.groups.values():
            await group.settle()
        page = (await decisions(cluster, "?limit=2")).json()
        everything = await explain(cluster)
    assert page["object"] == "list"
    assert [each["request_id"] for each in page["data"]] == [names[2], names[1]]
    first = page["data"][0]
    assert first["routing"]["reason"] == "only_group"
    assert first["outcome"] == "length"
    assert first["num_prompt_tokens"] == 20
    assert [each.request_id for each in everything] == names[::-1]


async def test_a_completion_that_lost_its_group_is_told_attempt_by_attempt(
    start_cluster: Any,
) -> None:
    async with start_cluster() as cluster:
        cluster.take_steps_of(0.1)
        asked = request(explain_routing=True)
        asked.sampling.max_tokens = 60
        call = cluster.inference.Generate(asked)
        start = (await call.read()).start
        await cluster.groups[start.routing.group].kill()
        cluster.take_steps_of(0)
        while await call.read() is not grpc.aio.EOF:
            pass
        first, second = await explain(cluster, request_id=start.request_id)
    other = ({"g0", "g1"} - {start.routing.group}).pop()
    assert (first.attempt, first.routing.group) == (1, start.routing.group)
    assert first.outcome.startswith("moved: ")
    assert len(first.outcome) > len("moved: ")
    assert (second.attempt, second.routing.group, second.outcome) == (2, other, "length")
    assert second.num_prompt_tokens > 20, "what the client has is part of the prompt"


async def test_a_client_that_goes_away_is_told_of_as_such(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.take_steps_of(0.1)
        asked = request()
        asked.sampling.max_tokens = 300
        call = cluster.inference.Generate(asked)
        start = (await call.read()).start
        assert (await explain(cluster, request_id=start.request_id))[0].outcome == ""
        call.cancel()
        while not (await explain(cluster, request_id=start.request_id))[0].outcome:
            await asyncio.sleep(0.01)
        (found,) = await explain(cluster, request_id=start.request_id)
    assert found.outcome == "cancelled"


async def test_an_answer_whose_deadline_passed_is_told_of_as_such(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.take_steps_of(0.1)
        stream = await cluster.openai.completions.create(
            model="hash",
            prompt=PROMPT,
            max_tokens=300,
            n=2,
            stream=True,
            extra_body={"ignore_eos": True, "timeout": 400},
        )
        first = await anext(stream)
        cluster.clock.ahead_s = 1000
        with pytest.raises(openai.APIError, match="deadline passed"):
            async for _ in stream:
                pass
        found = await explain(cluster, request_id=first.id)
        metrics = cluster.models.telemetry.render().decode()
    assert [each.outcome for each in found] == ["deadline: passed before the end"] * 2
    assert 'quire_completions_total{model="hash",outcome="deadline"} 2.0' in metrics


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        # The number of others is not revealed.
        (
            "?request_id=nobody",
            404,
            "request_id='nobody': no routing decision is known here; only the last ones are kept: "
            "ask sooner",
        ),
        ("?request_id=cmpl-nobody", 404, "request_id='nobody'"),
        ("?request_id=", 400, "request_id='' is empty"),
        ("?limit=0", 400, "limit='0' is out of range: 1 to 1000"),
        ("?limit=1001", 400, "limit='1001' is out of range"),
        ("?limit=ten", 400, "limit='ten' is out of range"),
        ("?limit=1&request_id=x", 400, "limit=1 does not go with request_id"),
        ("?id=x", 400, "id: unknown; there are request_id, limit"),
    ],
)
async def test_a_question_that_has_no_answer_says_what_is_wrong(
    query: str, status: int, message: str, start_cluster: Any
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        answer = await decisions(cluster, query)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("how", ["http", "grpc"])
async def test_whoever_asks_for_much_holds_up_no_stream(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    loop_went_on = threading.Event()

    def recent(limit: int, *, tenant: str | None) -> list[Explanation]:
        assert loop_went_on.wait(120), "the event loop waits for this"
        return []

    async with start_cluster(num_groups=1) as cluster:
        monkeypatch.setattr(cluster.table, "recent", recent)
        ask = decisions(cluster, "") if how == "http" else explain(cluster)
        task: asyncio.Task[Any] = asyncio.create_task(ask)
        chunks = [chunk async for chunk in cluster.inference.Generate(request())]
        loop_went_on.set()
        answer = await task
    assert chunks[-1].finish_reason
    assert (answer.status_code == 200) if how == "http" else (answer == [])


async def test_grpc_says_the_same_with_its_own_codes(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="only the last ones are kept") as unknown:
            await explain(cluster, request_id="nobody")
        with pytest.raises(grpc.aio.AioRpcError, match="limit=1001 is out of range") as large:
            await explain(cluster, limit=1001)
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    assert large.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_command_line_prints_what_the_gateway_knows(
    start_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_cluster() as cluster:
        answer = await complete(cluster, headers={"X-Request-Id": "mine"})

        async def run(*arguments: str) -> tuple[int, str, str]:
            command = ["explain", *arguments, "--address", cluster.grpc_address]
            status = await asyncio.to_thread(cli.main, command)
            return status, *capsys.readouterr()

        listed = await run()
        shown = await run(answer["id"])
        unknown = await run("nobody")
        refused = await run("--limit", "0")
    name = answer["id"].removeprefix("cmpl-") + "-0"
    assert listed[0] == 0
    head, line = listed[1].splitlines()
    assert head.split()[:4] == ["when", "request", "group", "why"]
    assert name in line
    assert "0 / 0" in line
    assert shown[0] == 0
    assert f"{name} (mine), attempt 1, " in shown[1]
    assert "outcome: length" in shown[1]
    rows = [row.split() for row in shown[1].splitlines()[-2:]]
    assert rows[0][0] == "->"
    assert {rows[0][1], rows[1][0]} == {"g0", "g1"}
    assert unknown[0] == 1
    assert "NOT_FOUND: request_id='nobody'" in unknown[2]
    assert refused[0] == 2
    assert "limit=0: must be 1 or more" in refused[2]


async def test_what_other_gateways_know_is_part_of_the_answer(start_cluster: Any) -> None:
    """All requests: newest first, as many as asked for. One request: oldest first."""

    def told(name: str, decided_at_s: float) -> pb.RoutingDecision:
        return pb.RoutingDecision(request_id=name, decided_at_s=decided_at_s)

    asked: list[tuple[str, str | None]] = []

    async def others(
        question: pb.ExplainRoutingRequest, tenant: str | None
    ) -> tuple[list[pb.ExplainRoutingResponse], str]:
        asked.append((question.request_id, tenant))
        early, late = told("early", 1e9), told("late", 3e9)
        answers = [[late, early], [told("later", 4e9)]]
        return [pb.ExplainRoutingResponse(decisions=each) for each in answers], "g3 is silent"

    async with start_cluster(num_groups=1) as cluster:
        own = (await complete(cluster))["id"].removeprefix("cmpl-") + "-0"
        cluster.models.explanations.ask_others = others
        recent = await explain(cluster, limit=3)
        by_name = await explain(cluster, request_id="elsewhere")
        page = (await decisions(cluster, "?limit=1")).json()
    assert [each.request_id for each in recent] == ["later", "late", own]
    assert [each.request_id for each in by_name] == ["early", "late", "later"]
    assert [each["request_id"] for each in page["data"]] == ["later"]
    assert page["incomplete"] == "g3 is silent"
    assert asked == [("", None), ("elsewhere", None), ("", None)]


async def test_where_a_gateway_does_not_answer_a_request_may_not_be_unknown(
    start_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async def silent(*_: object) -> tuple[list[pb.ExplainRoutingResponse], str]:
        return [], "1 other gateways did not answer"

    async with start_cluster(num_groups=1) as cluster:
        await complete(cluster)
        cluster.models.explanations.ask_others = silent
        answer = await decisions(cluster, "?request_id=nobody")
        command = ["explain", "--address", cluster.grpc_address]
        assert await asyncio.to_thread(cli.main, command) == 0
    assert answer.status_code == 404
    assert "or again, since 1 other gateways did" in answer.json()["error"]["message"]
    assert "there may be more: 1 other gateways did not answer" in capsys.readouterr().err
