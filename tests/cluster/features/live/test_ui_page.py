"""The live page as a person sees it in Chromium, served by a gateway with groups."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.telemetry.timeline import Timeline
from quire.worker.request.config import EngineConfig

playwright_api = pytest.importorskip("playwright.async_api")
playwright_api.expect.set_options(timeout=120_000)  # Ends failed tests only.
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("no chromium", allow_module_level=True)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HOSTILE = "<img src=x onerror=document.title=1>"


@contextlib.asynccontextmanager
async def page_at(url: str, profile: Path, *, may_fail: tuple[str, ...] = ()) -> AsyncIterator[Any]:
    """The page in a fresh browser. Script errors, console messages and requests to other servers
    fail the test, except for the browser's reports of failed requests to ``may_fail``."""
    wrong: list[str] = []
    async with playwright_api.async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, args=OPTIONS, headless=True
        )
        page = context.pages[0]

        def said(message: Any) -> None:
            at = message.location["url"]
            if not any(at.startswith(f"{url}{path}") for path in may_fail):
                wrong.append(f"console: {message.text} ({at})")

        def asked(request: Any) -> None:
            if not request.url.startswith(f"{url}/"):
                wrong.append(f"asked {request.url}")

        page.on("console", said)
        page.on("pageerror", lambda error: wrong.append(f"raised {error}"))
        page.on("request", asked)
        try:
            await page.goto(f"{url}/ui")
            yield page
        finally:
            await context.close()
    assert not wrong


async def test_it_shows_groups_a_chat_and_the_seam_where_its_group_was_killed(
    start_cluster: Any, tmp_path: Path
) -> None:
    async with (
        start_cluster(num_groups=3, model_len=2000) as cluster,
        page_at(cluster.http_url, tmp_path) as page,
    ):
        expect = playwright_api.expect
        await expect(page.locator(".card.ready")).to_have_count(3)
        await expect(page.get_by_text("No request yet.")).to_be_visible()
        cluster.take_steps_of(0.03)
        await page.get_by_label("Message").fill("the cat sat")
        await page.get_by_label("Message").press("Enter")
        named = page.locator(".told b")
        await named.wait_for()
        await expect(page.locator(".answer")).to_have_text(re.compile(".{8,}"))
        former = await named.inner_text()
        await cluster.groups[former].kill()
        await expect(page.locator(".seam")).to_have_text(re.compile(rf"{former} → g\d"))
        cluster.take_steps_of(0)
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await expect(page.locator(".told .lost")).to_contain_text(f"{former} was left after")
        await expect(page.locator(".card.lost .name")).to_have_text(former)
        await expect(page.locator(".waterfall .lost")).to_have_count(1)

        shown = await page.evaluate(
            "[...document.querySelector('.answer').childNodes]"
            ".filter(node => node.nodeType === 3).map(node => node.data)"
        )
        sent = cluster.table.recent(1)[0]
        text = "".join(shown)
        assert sent.attempt == 2
        assert len(text) > 20
        assert shown[0], "nothing is before the seam"
        assert await page.locator("tbody tr").count() == 2


async def test_a_request_is_drawn_from_its_tokenizing_to_its_last_token(
    start_cluster: Any, tmp_path: Path
) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        page_at(cluster.http_url, tmp_path) as page,
    ):
        cluster.take_steps_of(0.02)
        ended: list[Timeline] = []
        cluster.models.on_finished.append(ended.append)
        await cluster.openai.chat.completions.create(
            model=cluster.gateway.model,
            messages=[{"role": "user", "content": "the cat sat on the mat"}],
            max_tokens=8,
        )
        row = page.locator(".requests li")
        await playwright_api.expect(row).to_have_count(1)
        drawn = await row.locator(".waterfall i").evaluate_all(
            "parts => parts.map(part => [part.className, parseFloat(part.style.width)])"
        )
        assert [kind for kind, _ in drawn] == ["tokenize", "queue", "prefill", "decode"]
        (call,) = [each for each in ended if each.model]
        (attempt,) = call.completions[0].attempts
        assert call.prepared_s is not None
        assert attempt.begun_s is not None
        assert attempt.ended_s is not None
        assert call.ended_s is not None
        marks = [call.arrival_s, call.prepared_s, attempt.routed_s]
        marks += [attempt.begun_s, attempt.ended_s]
        for (_, width), (begin_s, end_s) in zip(drawn, pairwise(marks), strict=True):
            share = 100 * (end_s - begin_s) / (call.ended_s - call.arrival_s)
            assert width == pytest.approx(share, abs=0.2)
        await row.get_by_role("button").click()
        steps = page.locator(".steps li")
        await playwright_api.expect(steps.nth(0)).to_contain_text("chat template and tokenizer")
        await playwright_api.expect(steps.nth(1)).to_contain_text("in the queue")


async def test_what_clients_send_is_text_and_nothing_else(
    start_cluster: Any, tmp_path: Path
) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        page_at(cluster.http_url, tmp_path) as page,
    ):
        client = cluster.openai.with_options(default_headers={"X-Request-Id": HOSTILE})
        await client.completions.create(model=cluster.gateway.model, prompt="the cat", max_tokens=2)
        await page.locator(".requests li button").click()
        await playwright_api.expect(page.locator(".steps")).to_contain_text(HOSTILE)
        await page.get_by_label("Message").fill(HOSTILE)
        await page.get_by_role("button", name="Send").click()
        await playwright_api.expect(page.locator(".question")).to_have_text(HOSTILE)
        await playwright_api.expect(page.locator(".told")).to_contain_text("out")
        assert await page.locator("img").count() == 0
        assert await page.title() == "Quire"


async def test_a_key_is_asked_for_and_a_tenants_shows_its_own_requests_only(
    start_cluster: Any, tmp_path: Path
) -> None:
    callers = {
        "boss": Caller(is_operator=True),
        "acme": Caller(tenant="acme"),
        "other": Caller(tenant="other"),
    }
    async with (
        start_cluster(num_groups=1, keys=ApiKeys(callers)) as cluster,
        page_at(cluster.http_url, tmp_path, may_fail=("/ui/events",)) as page,
    ):
        expect = playwright_api.expect
        await expect(page.locator(".status")).to_have_text("key wanted")
        theirs = cluster.openai.with_options(api_key="other")
        await theirs.completions.create(model=cluster.gateway.model, prompt="a", max_tokens=1)

        await _enter(page, "nobody's")
        await expect(page.get_by_role("alert")).to_contain_text("does not know this key")
        await _enter(page, "acme")
        await expect(page.locator(".status")).to_have_text("tenant's view")
        await page.get_by_label("Message").fill("the cat sat")
        await page.get_by_label("Message").press("Enter")
        await expect(page.locator("tbody tr")).to_have_count(1)
        assert await page.locator(".card").count() == 0

        await _enter(page, "boss")
        await expect(page.locator(".card.ready")).to_have_count(1)
        await expect(page.locator("tbody tr")).to_have_count(2)
        stored = await page.evaluate("[localStorage.length, document.cookie]")
        assert stored == [0, ""]


async def test_it_fits_a_narrow_window_and_keeps_going_when_the_gateway_lets_it_go(
    start_cluster: Any, tmp_path: Path
) -> None:
    async with (
        start_cluster(num_groups=2) as cluster,
        page_at(cluster.http_url, tmp_path) as page,
    ):
        await page.locator(".card.ready").first.wait_for()
        for width in (400, 1600):
            await page.set_viewport_size({"width": width, "height": 900})
            await asyncio.sleep(0.1)
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
        cluster.models.begin_drain()
        await playwright_api.expect(page.locator(".status")).to_have_text("connection lost")


@pytest.mark.parametrize(
    ("tasks", "offered"),
    [
        ({"a": "generate", "b": "embed", "c": "score", "d": ""}, ["a", "d"]),
        ({"a": "embed", "b": "generate"}, []),  # A single model needs no list.
        ({"a": "embed", "b": "score"}, None),
    ],
)
async def test_the_chat_offers_models_that_generate(
    start_cluster: Any, tmp_path: Path, tasks: dict[str, str], offered: list[str] | None
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        live = cluster.models.live
        (one,) = live._watched()
        live._watched = lambda: [one._replace(model=a, task=task) for a, task in tasks.items()]
        refused = ("/v1/chat/completions",)  # No model has this name.
        async with page_at(cluster.http_url, tmp_path, may_fail=refused) as page:
            await page.locator(".card.ready").first.wait_for()
            if offered is None:
                await page.get_by_text("No model here writes text").wait_for()
                assert await page.get_by_label("Message").count() == 0
                return
            await page.get_by_label("Message").fill("the cat")
            options = page.get_by_label("Model").locator("option")
            assert await options.all_inner_texts() == offered
            async with page.expect_request("**/v1/chat/completions") as asked:
                await page.get_by_label("Message").press("Enter")
            sent = (await asked.value).post_data_json
            assert tasks[sent["model"]] in ("", "generate")


async def test_calls_of_the_reference_name_a_model_where_there_are_several(tmp_path: Path) -> None:
    engine = EngineConfig(model=demo_model.PATH, num_blocks=64, num_threads=1)
    config = ClusterConfig(
        engine=engine,
        served_model_name="one",
        more_models=(ModelConfig(engine=engine, served_model_name="org/two"),),
        grpc_port=0,
        http_port=0,
    )
    server = await GatewayServer.start(config)
    try:
        url = f"http://{server.http_address}"
        async with page_at(url, tmp_path) as page:
            await page.goto(f"{url}/docs")
            chat = page.locator("#v1-chat-completions")
            await chat.get_by_text("Try it").click()
            has_name = re.compile(r'^\{\s*"model": "one",\s*"messages"')
            await playwright_api.expect(chat.locator("textarea")).to_have_value(has_name)
            adapter = page.locator("#v1-load-lora-adapter textarea")
            assert '"model"' not in await adapter.input_value()  # A field that it lacks.
            assert await page.locator("#v1-models-model input").input_value() == "/v1/models/one"
            tasks = {"one": "embed", "org/two": "generate", "three": "score"}
            data = [{"id": name, "root": name, "task": task} for name, task in tasks.items()]
            await page.route("**/v1/models", lambda route: route.fulfill(json={"data": data}))
            await page.reload()
            await chat.get_by_text("Try it").click()
            for call, name in (
                ("v1-chat-completions", "org/two"),
                ("v1-embeddings", "one"),
                ("v1-rerank", "three"),
                ("tokenize", "org/two"),
            ):
                body = page.locator(f"#{call} textarea")
                await playwright_api.expect(body).to_have_value(re.compile(f'"model": "{name}"'))
    finally:
        await server.stop(drain_timeout_s=0)


async def _enter(page: Any, key: str) -> None:
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Use").click()
