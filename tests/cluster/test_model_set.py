"""A gateway changes its models to a new list while they serve requests."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.deploy import model_set
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.deploy.listed import Listed, from_json, listed_in, to_json
from quire.cluster.deploy.model_set import ModelSet
from quire.cluster.deploy.served_model import ServedModel, new_table
from quire.cluster.edge.admin_grpc import overview_of
from quire.cluster.features.adapters.catalog import Word
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.cluster.group.server import GroupServer
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError

pytestmark = pytest.mark.anyio

ENGINE = EngineConfig(
    model=demo_model.PATH, dtype="float32", num_blocks=64, num_threads=1, max_num_seqs=8
)
CONFIG = ClusterConfig(
    engine=ENGINE, served_model_name="chat", grpc_port=0, http_port=0, group_wait_s=0
)
PROMPT = [5, 6, 7, 8]


@dataclass
class Serving:
    """A gateway whose groups the test starts."""

    stack: contextlib.AsyncExitStack
    server: GatewayServer
    client: httpx.AsyncClient
    models: ModelSet = field(init=False)
    followed: dict[str, list[ServedModel]] = field(default_factory=dict)

    def follow(self, listed: Listed, served: ServedModel) -> Callable[[], None]:
        self.followed.setdefault(listed.part, []).append(served)
        return lambda: self.followed[listed.part].remove(served)

    async def start_group(self, listed: Listed) -> GroupServer:
        """Starts a group and publishes it to subscribers of its pool."""
        config = CONFIG.serving(listed.settings)
        group = await GroupServer.start(config, group_id=f"g-{listed.part}")
        self.stack.push_async_callback(group.stop, drain_timeout_s=0)
        for served in self.followed[listed.part]:
            served.set_groups([group.contact])
            while not served.service.groups.num_ready:
                await served.service.groups.wait_for_change(timeout_s=1)
        return group

    async def ask(self, model: str, num_tokens: int = 1) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        return await self.client.post("/v1/completions", json=body | more)

    async def states(self) -> dict[str, str]:
        data = (await self.client.get("/v1/models")).json()["data"]
        return {each["id"]: each["state"] for each in data}

    async def samples(self, name: str) -> dict[str, float]:
        """Sums of a metric, by model."""
        page = (await self.client.get("/metrics")).text
        found: dict[str, float] = {}
        seen = set()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = sample.name, *sorted(sample.labels.items())
                assert key not in seen
                seen.add(key)
                if sample.name == name:
                    model = sample.labels["model"]
                    found[model] = found.get(model, 0.0) + sample.value
        return found


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    async with contextlib.AsyncExitStack() as stack:
        server = GatewayServer(CONFIG)
        await server.listen()
        stack.push_async_callback(server.stop, drain_timeout_s=0)
        # The client closes first: a server that stops gives idle connections two seconds.
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=None)
        )
        made = Serving(stack, server, client)
        made.models = ModelSet(CONFIG, server.models, make_table=new_table, follow=made.follow)
        stack.push_async_callback(made.models.close)
        yield made


def listed(name: str, path: Path = demo_model.PATH, part: str = "", **changes: Any) -> Listed:
    settings = ModelConfig(engine=replace(ENGINE, model=path), served_model_name=name, **changes)
    (found,) = listed_in(CONFIG.serving(settings))
    return replace(found, part=part or found.part)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)


def test_the_list_is_the_same_after_a_way_through_json() -> None:
    made = [
        listed("org/a", aliases=("a", "b"), autoscaling=AutoscalingSettings(min_groups=0)),
        replace(listed("b", num_groups=3, chat_template="{{ x }}"), trouble="no such file"),
    ]
    assert from_json(to_json(made)) == made


async def test_models_come_and_go(serving: Serving) -> None:
    first, other = listed("chat", aliases=("gpt-4",)), listed("other")
    await serving.models.set([first])
    await serving.start_group(first)
    assert await serving.states() == {"chat": "ready", "gpt-4": "ready"}
    await serving.models.set([other, replace(first, settings=replace(first.settings, aliases=()))])
    assert await serving.states() == {"other": "starting", "chat": "ready"}
    assert (await serving.ask("gpt-4")).status_code == 404
    await serving.start_group(other)
    assert (await serving.ask("other")).status_code == 200
    assert await serving.samples("quire_output_tokens_total") == {"chat": 0, "other": 1}
    await serving.models.set([first])
    refused = await serving.ask("other")
    assert refused.status_code == 404
    assert "'other' does not exist: 'chat' is served" in refused.text
    assert (await serving.ask("gpt-4")).status_code == 200
    await until(lambda: not serving.followed["other"])
    assert set(await serving.samples("quire_output_tokens_total")) == {"chat"}


async def test_the_console_is_told_how_many_groups_there_should_be(serving: Serving) -> None:
    scaled = AutoscalingSettings(min_groups=1)
    await serving.models.set([listed("a", num_groups=2), listed("b", autoscaling=scaled)])
    assert overview_of(serving.server.models).num_groups == 3
    await serving.models.set([listed("a", num_groups=4)])
    assert overview_of(serving.server.models).num_groups == 4


async def test_an_adapter_does_not_come_back_once_a_model_has_had_its_name(
    serving: Serving,
) -> None:
    adapters = serving.server.models.adapters
    await serving.models.set([listed("chat")])
    adapters.hear([Word(1, "sql", "chat", "x", "a"), Word(1, "gpt-4", "chat", "x", "b")])
    assert [*await serving.states()] == ["chat", "gpt-4", "sql"]
    await serving.models.set([listed("chat"), listed("sql", aliases=("gpt-4",))])
    assert [*await serving.states()] == ["chat", "sql", "gpt-4"]
    await serving.models.set([listed("chat")])
    assert [*await serving.states()] == ["chat"]


@pytest.mark.slow
async def test_a_stream_ends_on_the_model_that_was_removed_or_is_told(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = listed("chat")
    await serving.models.set([model])
    await serving.start_group(model)
    whole = (await serving.ask("chat", 100)).json()["choices"][0]["token_ids"]
    under_way = asyncio.create_task(serving.ask("chat", 100))
    service = serving.server.models.named("chat")
    await until(lambda: service.num_inflight > 0)
    await serving.models.set([])
    assert (await under_way).json()["choices"][0]["token_ids"] == whole
    assert not serving.server.models.is_ready

    monkeypatch.setattr(model_set, "_MARGIN_S", -CONFIG.drain_timeout_s)
    await serving.models.set([model])
    await until(lambda: not serving.server.models._leaving)
    group = await GroupServer.start(CONFIG, group_id="again")
    serving.stack.push_async_callback(group.stop, drain_timeout_s=0)
    (served,) = serving.followed["chat"]
    served.set_groups([group.contact])
    await until(lambda: served.service.groups.num_ready > 0)
    long = asyncio.create_task(serving.ask("chat", 400))
    await until(lambda: served.service.num_inflight > 0)
    await serving.models.set([])
    cut = await long
    assert cut.status_code == 503
    assert "'chat' is served here no longer" in cut.text


async def test_new_weights_take_over_when_they_have_a_group(serving: Serving) -> None:
    old, new = listed("chat"), listed("chat", part="chat:2", max_queued_requests=9)
    await serving.models.set([old])
    await serving.start_group(old)
    assert (await serving.ask("chat", 5)).status_code == 200
    before = serving.server.models.named("chat")
    await serving.models.set([new])
    assert serving.server.models.named("chat") is before
    assert serving.models.unsettled() == {"chat": "no group is known yet"}
    await serving.start_group(new)
    await until(lambda: not serving.models.unsettled())
    after = serving.server.models.named("chat")
    assert after is not before
    assert (await serving.ask("chat", 2)).status_code == 200
    assert await serving.samples("quire_output_tokens_total") == {"chat": 7}
    await until(lambda: not serving.followed["chat"])
    assert await serving.samples("quire_output_tokens_total") == {"chat": 7}
    assert await serving.samples("quire_ready_groups") == {"chat": 1}


async def test_one_that_is_told_of_again_before_it_took_over_is_given_up(serving: Serving) -> None:
    old, new = listed("chat"), listed("chat", part="chat:2", max_queued_requests=9)
    await serving.models.set([old])
    await serving.start_group(old)
    before = serving.server.models.named("chat")
    await serving.models.set([new])
    await serving.models.set([old])
    await until(lambda: not serving.followed["chat:2"])
    assert (await serving.ask("chat")).status_code == 200
    assert not serving.models.unsettled()
    assert serving.server.models.named("chat") is before


async def test_one_without_a_group_is_replaced_at_once(serving: Serving) -> None:
    await serving.models.set([listed("chat")])
    before = serving.server.models.named("chat")
    await serving.models.set([listed("chat", part="chat:2")])
    assert serving.server.models.named("chat") is not before


async def test_a_model_that_cannot_be_read_leaves_the_others_alone_and_is_tried_again(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_set, "_AGAIN_S", 0.1)
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    broken, good = listed("broken", path), listed("good")
    await serving.models.set([broken, good])
    await serving.start_group(good)
    assert await serving.states() == {"good": "ready", "broken": "failed"}
    one = (await serving.client.get("/v1/models/broken")).json()
    assert "tokenizer" in one["reason"]
    refused = await serving.ask("broken")
    assert (refused.status_code, one["reason"] in refused.json()["error"]["message"]) == (503, True)
    assert (await serving.ask("good")).status_code == 200
    assert "tokenizer" in serving.models.unsettled()["broken"]
    serving.models.check()
    shutil.copytree(demo_model.PATH, path, dirs_exist_ok=True)
    await until(lambda: not serving.models.unsettled())
    assert await serving.states() == {"broken": "starting", "good": "ready"}


async def test_a_model_that_was_in_trouble_from_the_start_is_listed_with_its_reason(
    serving: Serving,
) -> None:
    broken = replace(listed("broken"), trouble="CheckpointError: no weights")
    await serving.models.set([broken])
    assert await serving.states() == {"broken": "failed"}
    assert "no weights" in (await serving.ask("broken")).text
    assert not serving.server.models.is_ready
    await serving.models.set([listed("broken", part="broken:2")])
    assert await serving.states() == {"broken": "starting"}


async def test_a_gateway_that_can_read_no_model_says_why(serving: Serving, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    await serving.models.set([listed("broken", tmp_path)])
    with pytest.raises(CheckpointError, match="tokenizer"):
        serving.models.check()
