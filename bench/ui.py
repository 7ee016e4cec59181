"""The cost of the live page, at the gateway and in the browser.

    python -m bench.ui [--groups N] [--seconds N] [--picture FILE.png]

A gateway's HTTP API, and groups that are not there: their loads are made up, and change between any
two ticks, all of them. Requests are routed among them by the real table, which holds the blocks of
some shared prefixes. One Chromium shows the page. Wants the package playwright and Chromium.

    tick     CPU time of the gateway's thread for a tick, with the points and the event of changes
    update   from an event's arrival in the page until it is parsed, applied and laid out again, as
             the page itself measures it
"""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.report import command, markdown, percentile
from playwright.async_api import async_playwright

from quire.cluster.edge.openai_http import build_http_app
from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.guard.listener import HttpListener, listening_socket
from quire.cluster.features.installed import INSTALLED
from quire.cluster.features.live.live import Live, Watched
from quire.cluster.gateway.models import Models
from quire.cluster.telemetry.metrics import Telemetry
from quire.cluster.telemetry.timeline import Timeline
from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import HASH_BYTES, BlockHashes

_BLOCKS = 4096
_REQUESTS_PER_TICK = 50
_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


class FakeGroups:
    """What `Live` asks of `Groups`."""

    def __init__(self, num_groups: int, table: RoutingTable) -> None:
        self.chance = random.Random(4)
        self.table = table
        self.names = [GroupId(f"group-{number}") for number in range(num_groups)]
        self.clients = [
            SimpleNamespace(
                is_attached=True,
                address=f"10.0.0.{number}:50052",
                last_error="",
                description=pb.GroupDescription(
                    group_id=name, tensor_parallel_size=8, num_tiers=3, block_size=16
                ),
            )
            for number, name in enumerate(self.names)
        ]
        self.loads = {name: pb.Load(num_free_blocks=_BLOCKS) for name in self.names}
        self.num_ready = num_groups
        self.num_unsent_commands = 0
        self.num_routed = 0
        self.prefixes = [self.chance.randbytes(HASH_BYTES * 256) for _ in range(40)]
        table.update_members(self.names)
        idle = GroupLoad(num_running=0, num_waiting=0, num_pending_prefill_tokens=0)
        for name in self.names:
            table.update_load(name, idle)
            held = self.chance.sample(self.prefixes, 4)
            stored = tuple(BlocksStored(hashes=BlockHashes(prefix)) for prefix in held)
            table.apply_events(name, EventBatch(epoch=1, first_seq=0, events=stored))

    def is_routed_to(self, client: object) -> bool:
        return True

    def change(self) -> Iterator[Timeline]:
        """Another load of each group, and some requests."""
        chance = self.chance
        for load in self.loads.values():
            load.num_running, load.num_waiting = chance.randrange(64), chance.randrange(4)
            load.num_held_blocks = chance.randrange(_BLOCKS // 2)
            load.num_cached_blocks = chance.randrange(_BLOCKS // 2)
            load.num_free_blocks = _BLOCKS - load.num_held_blocks - load.num_cached_blocks
            load.num_output_tokens += chance.randrange(2000)
            load.num_prompt_tokens += chance.randrange(1, 4000)
            load.num_hit_tokens = load.num_prompt_tokens // 2
        for _ in range(_REQUESTS_PER_TICK):
            self.num_routed += 1
            name, depth = f"{self.num_routed:024x}", chance.choice([8, 16, 64, 256])
            hashes = BlockHashes(chance.choice(self.prefixes)[: HASH_BYTES * depth])
            call = Timeline(request_id=name)
            call.prepared()
            decision = self.table.route(name, hashes=hashes, num_prompt_tokens=16 * depth + 5)
            self.table.started(name, num_cached_tokens=16 * depth)
            self.table.completed(name, outcome="stop")
            completion = call.completion(name, index=0, is_first_of_prompt=True)
            completion.attempts.append(completion.attempt(decision, num_resumed_tokens=0))
            completion.attempts[0].end("stop")
            completion.end("stop", num_output_tokens=1)
            call.end()
            yield call


class TimedLive(Live):
    """Notes what each tick costs."""

    def __init__(self, groups: FakeGroups, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.groups = groups
        self.costs: list[float] = []
        self.sizes: list[int] = []

    def _sample(self) -> None:
        for call in self.groups.change():
            self.note(call)
        self.begin_s = time.thread_time()
        super()._sample()

    def _look(self) -> None:
        super()._look()
        if self.num_ticks > 1:
            self.costs.append(time.thread_time() - self.begin_s)
            self.sizes.append(len(self._change_event))


async def measure(num_groups: int, seconds: int, picture: Path | None) -> None:
    table = RoutingTable(block_size=16)
    groups: Any = FakeGroups(num_groups, table)
    telemetry = Telemetry(groups=groups, table=table)
    watched = Watched("model", groups, table, telemetry, "generate", num_queued=0, num_inflight=0)
    models = Models()
    models.live = live = TimedLive(groups, lambda: [watched])
    http = HttpListener(
        build_http_app(models, features=INSTALLED), limits=ConnectionLimits(), drain_timeout_s=0
    )
    listener = listening_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/ui"
    http.start(listener)
    with tempfile.TemporaryDirectory() as profile:
        async with async_playwright() as playwright:
            context = await playwright.chromium.launch_persistent_context(
                profile,
                executable_path=shutil.which("chromium"),
                args=_OPTIONS,
                headless=True,
                viewport={"width": 1600, "height": 1000},
            )
            page = context.pages[0]
            await page.goto(url)
            await asyncio.sleep(seconds)
            updates = await page.locator("html").get_attribute("data-updates")
            p95 = await page.locator("html").get_attribute("data-update-p95-ms")
            if picture is not None:
                await page.screenshot(path=picture)
            await context.close()
    live.end()
    await http.stop()
    milliseconds = [1000 * cost for cost in live.costs]
    rows = [
        ["tick, CPU ms", *(f"{percentile(milliseconds, percent):.1f}" for percent in (50, 95))],
        ["event, kB", *(f"{percentile(live.sizes, percent) / 1000:.1f}" for percent in (50, 95))],
        ["update in the page, ms", "", str(p95)],
    ]
    print(f"{num_groups} groups, {len(live.costs)} ticks, {updates} updates in the page")
    print(markdown(["", "p50", "p95"], rows))


def main() -> None:
    parser = command("bench.ui", __doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--picture", type=Path, help="of the page at the end")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.groups, arguments.seconds, arguments.picture))


if __name__ == "__main__":
    main()
