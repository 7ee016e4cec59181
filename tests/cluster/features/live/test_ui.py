"""The live page's files as a browser loads them, and its event stream."""

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.errors import Overloaded
from quire.cluster.features.live.live import MAX_CALLS, MAX_EVERY_S, MAX_VIEWERS, Live
from quire.cluster.features.live.rows import MAX_ATTEMPTS
from quire.cluster.telemetry.timeline import Attempt, Timeline

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[4]
BUILT = ROOT / "cluster/quire/cluster/features/live/ui"
SOURCES = ROOT / "cluster/ui"
OPERATOR, TENANT = {"Authorization": "Bearer boss"}, {"Authorization": "Bearer acme"}
HOSTILE = "<img src=x onerror=alert(1)>"

Event = tuple[str, dict[str, Any]]


@contextlib.asynccontextmanager
async def watching(url: str, **options: Any) -> AsyncIterator[AsyncIterator[Event]]:
    async with contextlib.aclosing(_events(url, **options)) as events:
        yield events


async def _events(url: str, **options: Any) -> AsyncGenerator[Event, None]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        client.stream("GET", "/ui/events", **options) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def test_the_page_and_its_files_need_no_key_and_nothing_from_elsewhere(
    start_cluster: Any,
) -> None:
    keys = ApiKeys({"boss": Caller(is_operator=True)})
    async with (
        start_cluster(num_groups=1, keys=keys) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as client,
    ):
        redirect = await client.get("/", headers={"Accept": "text/html"})
        assert redirect.headers["location"] == "ui"
        assert (await client.get("/")).status_code == 401
        page = await client.get("/ui")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["cache-control"] == "no-cache"
        for rule in ("default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
            assert rule in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page.text)
        names = re.findall(r'(?:src|href)="([^"]*)"', page.text)
        assert len(names) == 3
        for name in names:
            assert re.fullmatch(r"ui/assets/[\w-]+\.(js|css|svg)", name)
            file = await client.get(f"/{name}")
            assert file.status_code == 200
            assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert file.headers["x-content-type-options"] == "nosniff"
        assert "uplot" in (await client.get("/ui/licenses.txt")).text
        assert (await client.get("/ui/assets/none.js")).status_code == 404
        for path in ("/ui/assets/..%2findex.html", "/ui/assets/../%2e%2e"):
            assert (await client.get(path)).status_code == 401


async def test_browsers_are_sent_from_the_root_to_the_page_and_programs_are_not(
    start_cluster: Any,
) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as client,
    ):
        browser = {"Accept": "text/html,application/xhtml+xml"}
        for path in ("/", "/ui/"):
            answer = await client.get(path, headers=browser, follow_redirects=True)
            assert (answer.status_code, answer.url.path) == (200, "/ui")
        assert (await client.get("/")).status_code == 404


async def test_events_want_an_operators_key(start_cluster: Any) -> None:
    keys = ApiKeys({"boss": Caller(is_operator=True), "acme": Caller(tenant="acme")})
    async with (
        start_cluster(num_groups=1, keys=keys) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as client,
    ):
        assert (await client.get("/ui/events")).status_code == 401
        refused = await client.get("/ui/events", headers=TENANT)
        assert refused.status_code == 403
        assert "operator" in refused.json()["error"]["message"]
        async with watching(cluster.http_url, headers=OPERATOR) as events:
            assert (await anext(events))[0] == "picture"


@pytest.mark.parametrize(
    ("query", "named"), [("every=0", "every"), (f"every={MAX_EVERY_S + 1}", "every"), ("x=1", "x")]
)
async def test_a_pace_that_cannot_be_is_refused_by_name(
    start_cluster: Any, query: str, named: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient() as client:
        answer = await client.get(f"{cluster.http_url}/ui/events?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(named)


@pytest.mark.slow
async def test_a_picture_comes_first_and_then_what_changes(start_cluster: Any) -> None:
    async with start_cluster(num_groups=2) as cluster, watching(cluster.http_url) as seen:
        name, picture = await anext(seen)
        assert name == "picture"
        groups = {row["group"]: row for row in picture["groups"].values()}
        assert groups.keys() == {"g0", "g1"}
        assert all(row["state"] == "ready" and row["ranks"] == 0 for row in groups.values())
        assert sum(groups["g0"][name] for name in ("held", "cached", "free")) == 200
        assert picture["gateway"]["models"] == [{"name": cluster.gateway.model, "task": "generate"}]

        answer = await cluster.openai.with_options(
            default_headers={"X-Request-Id": HOSTILE}
        ).chat.completions.create(
            model=cluster.gateway.model,
            messages=[{"role": "user", "content": "the cat sat on the mat"}],
            max_tokens=5,
        )
        rows, calls = [], []
        async for name, change in seen:
            assert name == "change"
            rows += [row for row in change["decisions"] if row["outcome"]]
            calls += change["calls"]
            if rows and calls:
                break
        (row,), (call,) = rows, calls
        assert call["id"] == answer.id.removeprefix("chatcmpl-")
        assert call["client_id"] == HOSTILE
        assert (call["tokens"], call["output"]) == (answer.usage.prompt_tokens, 5)
        assert call["outcome"] == "length"
        (attempt,) = call["attempts"]
        assert attempt["group"] == row["group"]
        times = [call["prepared"], call["admitted"], *(attempt[at] for at in ("sent", "first"))]
        assert times[0] > 0
        assert times == sorted(times)
        assert times[-1] <= attempt["end"] <= call["total"]
        assert row["id"] == f"{answer.id.removeprefix('chatcmpl-')}-0"
        assert row["client_id"] == HOSTILE
        assert row["tokens"] == answer.usage.prompt_tokens
        assert row["group"] in groups
        assert row["waited"] > 0

        await cluster.groups["g0"].kill()
        async for _, change in seen:
            lost = [row for row in change["groups"].values() if row["state"] == "lost"]
            if lost:
                break
        assert lost[0]["group"] == "g0"
        assert lost[0]["why"]


async def test_prefixes_that_were_asked_for_twice_are_shown_with_their_holders(
    start_cluster: Any,
) -> None:
    async with start_cluster(num_groups=2) as cluster:
        for _ in range(2):
            await cluster.openai.completions.create(
                model=cluster.gateway.model, prompt="that is that " * 20, max_tokens=2
            )
        async with watching(cluster.http_url, params={"every": 5}) as pictures:
            async for _, picture in pictures:
                if any(row["holders"] for row in picture["prefixes"]):
                    break
        rows = {row["name"]: row for row in picture["prefixes"]}
        assert all(row["hits"] == 2 for row in rows.values())
        for row in rows.values():
            if row["parent"] is not None:
                assert rows[row["parent"]]["tokens"] * 2 == row["tokens"]


async def test_calls_that_ended_are_kept_for_viewers_in_bounded_memory() -> None:
    live = Live(lambda: [])
    untokenized = Timeline()
    untokenized.end()
    live.note(untokenized)
    for number in range(MAX_CALLS + 5):
        call = Timeline(request_id=str(number), error="queue_full" if number % 2 else "")
        call.prepared()
        for index in range(3):
            record = call.completion(f"{number}-{index}", index=index, is_first_of_prompt=True)
            for turn in range(2 * MAX_ATTEMPTS):
                attempt = Attempt(f"g{turn}", "least_loaded", None, 0, time.monotonic())
                attempt.end("y" * 1000)
                record.attempts.append(attempt)
            record.end("stop" if index else "", num_output_tokens=1)
        call.end()
        live.note(call)
    pictures: list[bytes] = []

    async def write(event: bytes) -> None:
        pictures.append(event)
        live.end()

    await live.watch(write)
    (calls,) = (json.loads(each.partition(b"data: ")[2])["calls"] for each in pictures)
    assert [each["id"] for each in calls] == [str(5 + number) for number in range(MAX_CALLS)]
    assert all(len(each["attempts"]) == MAX_ATTEMPTS for each in calls)
    assert calls[0]["attempts"][-1]["group"] == f"g{2 * MAX_ATTEMPTS - 1}"
    assert calls[0]["admitted"] is None
    assert len(pictures[0]) < MAX_CALLS * MAX_ATTEMPTS * 500


async def test_a_viewer_that_may_no_longer_watch_is_disconnected() -> None:
    live, pictures = Live(lambda: [], tick_s=0.01), list[bytes]()

    async def write(event: bytes) -> None:
        pictures.append(event)

    await live.watch(write, may_watch=lambda: len(pictures) < 3)
    assert (len(pictures), live.num_viewers) == (3, 0)
    live.end()


async def test_a_tick_is_computed_once_for_all_viewers() -> None:
    live = Live(lambda: [], tick_s=0.01)
    seen: list[list[bytes]] = [[] for _ in range(8)]

    def into(taken: list[bytes]) -> Callable[[bytes], Any]:
        async def write(event: bytes) -> None:
            taken.append(event)

        return write

    tasks = [asyncio.create_task(live.watch(into(taken))) for taken in seen]
    await until(lambda: min(map(len, seen)) > 5)
    live.end()
    await asyncio.gather(*tasks)
    assert live.num_viewers == 0
    assert len({id(event) for taken in seen for event in taken}) <= live.num_ticks + 1


async def test_a_slow_reader_skips_ticks_and_gets_the_picture_again() -> None:
    live = Live(lambda: [], tick_s=0.01)
    gate, taken = asyncio.Event(), list[bytes]()

    async def write(event: bytes) -> None:
        taken.append(event)
        if len(taken) == 3:
            await gate.wait()

    watching = asyncio.create_task(live.watch(write))
    await until(lambda: len(taken) == 3)
    num_ticks = live.num_ticks
    await until(lambda: live.num_ticks > num_ticks + 5)
    assert len(taken) == 3
    gate.set()
    await until(lambda: len(taken) >= 5)
    live.end()
    await watching
    names = [event.partition(b"\n")[0] for event in taken[:5]]
    picture, change = b"event: picture", b"event: change"
    assert names == [picture, change, change, picture, change]


async def test_viewers_that_come_and_go_cost_no_ticks_of_their_own() -> None:
    live = Live(lambda: [], tick_s=3600)

    async def write(event: bytes) -> None:
        raise ConnectionResetError

    for _ in range(20):
        with pytest.raises(ConnectionResetError):
            await live.watch(write)
    assert live.num_ticks == 1
    live.end()


async def test_viewers_are_bounded() -> None:
    live = Live(lambda: [], tick_s=0.01)

    async def write(event: bytes) -> None:
        pass

    tasks = [asyncio.create_task(live.watch(write)) for _ in range(MAX_VIEWERS)]
    await until(lambda: live.num_viewers == MAX_VIEWERS)
    with pytest.raises(Overloaded, match=f"{MAX_VIEWERS} viewers"):
        await live.watch(write)
    tasks.pop().cancel()
    await until(lambda: live.num_viewers < MAX_VIEWERS)
    tasks.append(asyncio.create_task(live.watch(write)))
    await until(lambda: live.num_viewers == MAX_VIEWERS)
    live.end()
    await asyncio.gather(*tasks)


async def test_one_viewer_too_many_is_answered_429(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient() as client:
        monkeypatch.setattr(cluster.models.live, "num_viewers", MAX_VIEWERS)
        answer = await client.get(f"{cluster.http_url}/ui/events")
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "5"


async def test_a_viewer_that_leaves_is_forgotten_and_a_drain_lets_all_go(
    start_cluster: Any,
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        async with watching(cluster.http_url) as events:
            await anext(events)
        await until(lambda: cluster.models.live.num_viewers == 0)
        async with watching(cluster.http_url) as events:
            await anext(events)
            cluster.models.begin_drain()
            assert [name async for name, _ in events] in ([], ["change"])


def test_the_build_is_of_the_sources_that_are_here() -> None:
    """`make ui` writes the sources' digest beside the built files."""
    names = [
        path.relative_to(SOURCES).as_posix()
        for path in (SOURCES / "src").rglob("*")
        if path.is_file()
    ]
    names += ["index.html", "package-lock.json", "vite.config.ts"]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\0".encode() + (SOURCES / name).read_bytes() + b"\0")
    assert (BUILT / "sources.txt").read_text().strip() == digest.hexdigest(), "run `make ui`"


def test_the_build_is_small_and_the_lock_names_no_registry() -> None:
    sizes = [path.stat().st_size for path in BUILT.rglob("*") if path.is_file()]
    assert sum(sizes) < 250_000
    lock = json.loads((SOURCES / "package-lock.json").read_text())
    assert not [name for name, each in lock["packages"].items() if "resolved" in each]


def test_the_wheel_carries_all_of_the_build() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel")
    files = wheel.WheelBuilder(str(ROOT)).recurse_included_files()
    packed = {file.distribution_path for file in files}
    built = {path.relative_to(ROOT / "cluster").as_posix() for path in BUILT.rglob("*.*")}
    assert len(built) > 4
    assert built <= packed
