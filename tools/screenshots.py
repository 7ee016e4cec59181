"""Takes screenshots of the live page of a small cluster under traffic, in Chromium.

    python -m tools.screenshots [FOLDER]

The cluster is in this process: groups of the demo model and one gateway. While a chat is answered,
its group is killed, so that the picture shows where the stream moved. Needs the package playwright
and ``/usr/bin/chromium``. The default `FOLDER` is docs/images.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Page, Route, async_playwright

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.group.server import GroupServer
from quire.worker.request.config import EngineConfig

CHROMIUM = "/usr/bin/chromium"
CHROMIUM_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"wide": (1600, 1300), "narrow": (400, 860)}
_NUM_GROUPS = 4
_NUM_CLIENTS = 12
_TRAFFIC_S = 20.0
_STEP_S = 0.02


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[GatewayServer, dict[str, GroupServer]]]:
    engine = EngineConfig(model=demo_model.PATH, num_blocks=600, num_threads=1, max_num_seqs=8)
    config = ClusterConfig(engine=engine, grpc_port=0, http_port=0)
    groups = {
        name: await GroupServer.start(config, group_id=name)
        for name in (f"group-{number}" for number in range(_NUM_GROUPS))
    }
    for group in groups.values():
        _pace(group)
    gateway = await GatewayServer.start(config)
    try:
        gateway.models.live.name = "node-1 127.0.0.1:8000"
        gateway.set_groups([group.contact for group in groups.values()])
        while gateway.models.num_ready_groups < _NUM_GROUPS:
            await asyncio.sleep(0.1)
        yield gateway, groups
    finally:
        await gateway.stop(drain_timeout_s=0)
        for group in groups.values():
            await group.stop(drain_timeout_s=0)


def _pace(group: GroupServer) -> None:
    """Slows steps to those of a larger model, so that a group can be killed during an answer."""
    engine = group._engine
    step = engine.step

    def paced_step():  # type: ignore[no-untyped-def]
        time.sleep(_STEP_S)
        return step()

    engine.step = paced_step  # type: ignore[method-assign]


async def traffic(url: str) -> None:
    """Chats that share a system prompt and grow by their answers, until cancelled."""
    chance = random.Random(1)

    async def chat(client: httpx.AsyncClient) -> None:
        while True:
            messages = [{"role": "system", "content": demo_model.SYSTEM_PROMPT}]
            for question in chance.sample(demo_model.QUESTIONS, 3):
                messages.append({"role": "user", "content": question})
                body = {"messages": messages, "max_tokens": chance.randint(16, 60)}
                answer = await client.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    message = answer.json()["choices"][0]["message"]
                    messages.append({"role": "assistant", "content": message["content"]})
                await asyncio.sleep(chance.random())

    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        for _ in range(_NUM_CLIENTS):
            tasks.create_task(chat(client))


async def take(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    async with cluster() as (gateway, groups):
        url = f"http://{gateway.http_address}"
        load = asyncio.create_task(traffic(url))
        try:
            with tempfile.TemporaryDirectory() as profile:
                await _photograph(url, groups, profile, folder)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)


async def _photograph(url: str, groups: dict[str, GroupServer], profile: str, folder: Path) -> None:
    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, args=CHROMIUM_OPTIONS, headless=True
        )
        page = context.pages[0]
        await page.route("**/v1/chat/completions", _at_length)
        page.on("console", lambda message: print("console:", message.text))
        page.on("pageerror", lambda error: print("error:", error))
        await page.goto(f"{url}/ui")
        await asyncio.sleep(_TRAFFIC_S)
        await _chat_with_a_loss(page, groups)
        await asyncio.sleep(2)
        await page.locator(".icicle button").first.click()
        await page.locator(".requests li button").first.click()
        for name, (width, height) in SIZES.items():
            await page.set_viewport_size({"width": width, "height": height})
            await page.evaluate("scrollTo(0, 0)")
            for scheme in ("light", "dark"):
                await page.emulate_media(color_scheme=scheme)
                await asyncio.sleep(2)
                path = folder / f"ui-{name}-{scheme}.png"
                await page.screenshot(path=path, full_page=name == "narrow")
                with Image.open(path) as picture:
                    picture.convert("RGB").quantize(128).save(path, optimize=True)
        p95 = await page.locator("html").get_attribute("data-update-p95-ms")
        print(p95, "ms an update, 95 in 100")
        await context.close()


async def _at_length(route: Route) -> None:
    """Requests longer answers than the demo model's own, which end before a group is killed."""
    asked = json.loads(route.request.post_data or "{}")
    await route.continue_(post_data=json.dumps({**asked, "ignore_eos": True, "max_tokens": 160}))


async def _chat_with_a_loss(page: Page, groups: dict[str, GroupServer]) -> None:
    """Requests a long answer, and kills the group that generates it."""
    await page.get_by_label("Message").fill("Tell me about the history of bridges.")
    await page.get_by_role("button", name="Send").click()
    told = page.locator(".told b").first
    await told.wait_for()
    victim = groups[await told.inner_text()]
    await asyncio.sleep(1)
    await victim._server.stop(None)
    await page.get_by_role("button", name="Send").wait_for(timeout=60_000)


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")))
