"""Clients' cache hints take effect: affinity keys, and retention times of prefixes."""

from typing import Any

import httpx
import pytest

from quire.worker.request.request import Prepared

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "?"}]


def marked(mark: object) -> dict[str, Any]:
    block = {"type": "text", "text": "s", "cache_control": mark}
    return {"max_tokens": 1, "messages": HELLO, "system": [block]}


async def kept_s(cluster: Any, path: str, body: dict[str, Any]) -> float:
    """Seconds for which a group was asked to keep the body's prompt."""
    seen: list[Prepared] = []
    engine_loop = cluster.groups["g0"].engine_loop
    submit = engine_loop.submit

    def see(request: Prepared, sink: Any) -> None:
        seen.append(request)
        submit(request, sink)

    engine_loop.submit = see
    async with httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client:
        answer = await client.post(path, json=body)
    engine_loop.submit = submit
    assert answer.status_code == 200, answer.text
    return seen[0].keep_s


async def test_openais_retention_and_anthropics_marks_reach_the_group(start_cluster: Any) -> None:
    chat = {"model": "hash", "messages": HELLO, "max_tokens": 1}
    async with start_cluster(num_groups=1) as cluster:
        for retention, seconds in ((None, 0), ("in_memory", 0), ("24h", 86_400)):
            body = chat | {"prompt_cache_retention": retention}
            assert await kept_s(cluster, "/v1/chat/completions", body) == seconds
        for mark, seconds in (
            (None, 0),
            ({"type": "ephemeral"}, 300),
            ({"type": "ephemeral", "ttl": "1h"}, 3600),
        ):
            assert await kept_s(cluster, "/v1/messages", marked(mark)) == seconds
        whole = {"max_tokens": 1, "messages": HELLO, "cache_control": {"type": "ephemeral"}}
        assert await kept_s(cluster, "/v1/messages", whole) == 300


@pytest.mark.parametrize("mark", [{"type": "eternal"}, {"type": "ephemeral", "ttl": "2h"}, 5])
async def test_a_mark_of_another_kind_is_refused_by_its_place(
    start_cluster: Any, mark: object
) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        answer = await client.post("/v1/messages", json=marked(mark))
    assert answer.status_code == 400
    assert "system[0].cache_control" in answer.json()["error"]["message"]


async def test_cold_prompts_of_one_key_meet_in_one_group(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=4) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        for number in range(6):
            body = {
                "model": "hash",
                "messages": [{"role": "user", "content": f"{number} " * 40}],
                "max_tokens": 1,
                "prompt_cache_key": "k",
            }
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        groups = {each.decision.group for each in cluster.table.recent(10)}
    assert len(groups) == 1
