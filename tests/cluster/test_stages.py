"""Prefill groups: streams move to a decode group with their first token, and keep their tokens."""

from typing import Any

import httpx
import pytest

from quire.router.config import RoutingConfig
from quire.router.prefix_index.directory import GroupId
from quire.router.stages import Stages

pytestmark = pytest.mark.anyio

APART = RoutingConfig(num_prefill_groups=1)


async def complete(client: httpx.AsyncClient, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": "hash", "prompt": prompt, "max_tokens": 12, "seed": 1, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body | more)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def served_by(start_cluster: Any, routing: RoutingConfig, **more: Any) -> Any:
    """Answers to a long prompt and a short one, and for each completion whether its groups, in
    order, are prefill groups."""
    async with (
        start_cluster(num_groups=3, model_len=700, routing=routing) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        prompts = ([5 + number % 40 for number in range(500)], [7] * 20)
        answers = [await complete(client, prompt, logprobs=1, **more) for prompt in prompts]
        told = cluster.table.recent(10)[::-1]
        ids = list(dict.fromkeys(each.request_id for each in told))
        ways = [[each.decision.group for each in told if each.request_id == id_] for id_ in ids]
        return answers, [[*map(cluster.table.only_prefills, way)] for way in ways]


@pytest.mark.parametrize("more", [{}, {"max_tokens": 1}, {"n": 2}])
async def test_a_long_prompt_is_computed_apart_and_its_answer_is_the_same(
    start_cluster: Any, more: dict[str, Any]
) -> None:
    alike, _ = await served_by(start_cluster, RoutingConfig(), **more)
    answers, ways = await served_by(start_cluster, APART, **more)
    assert answers == alike
    num, is_one_token = more.get("n", 1), more.get("max_tokens") == 1
    assert ways[:num] == [[True] if is_one_token else [True, False]] * num
    assert ways[num:] == [[False]] * num


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_either_kind_of_group_may_be_lost(start_cluster: Any, lost: str) -> None:
    prompt = [5 + number % 40 for number in range(500)]
    async with (
        start_cluster(num_groups=2, model_len=700, routing=APART) as cluster,
        httpx.AsyncClient(timeout=None, base_url=cluster.http_url) as client,
    ):
        expected = await complete(client, prompt)
        (name,) = (
            each
            for each in cluster.groups
            if cluster.table.only_prefills(GroupId(each)) is (lost == "prefill")
        )
        await cluster.groups[name].close()
        assert await complete(client, prompt) == expected


def test_another_group_takes_the_place_of_one_that_leaves() -> None:
    stages = Stages(num_prefill_groups=2)
    names = [GroupId(f"g{number}") for number in range(5)]
    stages.update(names)
    before = stages.prefill
    assert len(before) == 2
    gone = min(before)
    stages.update(name for name in names if name != gone)
    assert len(stages.prefill) == 2
    assert before - {gone} <= stages.prefill
    stages.update(names[:2])
    assert not stages.prefill  # One group has to decode.
