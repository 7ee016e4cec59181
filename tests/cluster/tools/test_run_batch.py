"""Files of OpenAI's batch format, answered by a gateway."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai.types.chat import ChatCompletion

from quire.cluster.cli.main import main
from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.tools.run_batch.file import Limits, check_file
from quire.cluster.tools.run_batch.run import Ended, run_file
from quire.worker.request.errors import ConfigError, QuireError

pytestmark = pytest.mark.anyio

LIMITS = Limits()


def request(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello world!"},
    ]
    body = body or {"messages": messages, "max_tokens": 6}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def written(path: Path, *requests: Any) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    return {each["custom_id"]: each for each in answers}


async def run(source: Path, target: Path, limits: Limits = LIMITS, **options: Any) -> Ended:
    asked = check_file(source, limits)
    return await run_file(source, target, asked=asked, limits=limits, **options)


async def test_each_request_has_its_answer(start_cluster: Any, tmp_path: Path) -> None:
    source = written(
        tmp_path / "in.jsonl",
        *(request(f"chat-{number}") for number in range(20)),
        request("text", "/v1/completions", prompt="the cat", max_tokens=3, seed=5),
        request("bad", "/v1/completions", prompt="the cat", max_tokens=-2),
    )
    assert len(check_file(source, LIMITS)) == 22
    target = tmp_path / "out.jsonl"
    async with start_cluster(num_groups=2) as cluster:
        ended = await run(source, target, server=cluster.http_url, max_concurrency=4)
        alone = await cluster.openai.completions.create(
            model="hash", prompt="the cat", max_tokens=3, seed=5
        )
    assert ended[:3] == (22, 1, 0)
    answers = read(target)
    assert len(answers) == 22
    chat = ChatCompletion.model_validate(answers["chat-3"]["response"]["body"], strict=False)
    assert chat.choices[0].message.content
    assert answers["text"]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
    assert answers["text"]["response"]["request_id"]
    bad = answers["bad"]
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["param"] == "max_tokens"
    assert not list(tmp_path.glob("*.part*"))


async def test_a_resumed_run_asks_what_has_no_good_answer(
    start_cluster: Any, tmp_path: Path
) -> None:
    source = written(tmp_path / "in.jsonl", *(request(f"{number}") for number in range(6)))
    target = tmp_path / "out.jsonl"
    good = {"id": "x", "custom_id": "2", "response": {"status_code": 200, "body": {}}}
    bad = {"id": "x", "custom_id": "3", "response": {"status_code": 429, "body": {}}}
    part = written(tmp_path / "out.jsonl.part", good, bad)
    part.write_text(part.read_text() + '{"id": "y", "custom_id": "4", "respon')
    async with start_cluster(num_groups=1) as cluster:
        ended = await run(source, target, server=cluster.http_url, resumes=True)
    assert ended[:3] == (6, 0, 1)
    answers = read(target)
    assert answers.keys() == {f"{number}" for number in range(6)}
    assert answers["2"]["id"] == "x"
    assert all(each["response"]["status_code"] == 200 for each in answers.values())


async def test_a_server_that_has_no_room_is_asked_again(tmp_path: Path) -> None:
    num_asked = 0

    async def busy(_: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        return web.json_response({"ok": True})

    source = written(tmp_path / "in.jsonl", request("a", "/v1/completions", prompt="x"))
    async with serving(busy) as url:
        ended = await run(source, tmp_path / "out.jsonl", server=url)
    assert (num_asked, ended.num_failed) == (3, 0)


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """The address of a server that answers completions with ``handler``."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    (address,) = runner.addresses
    try:
        yield f"http://127.0.0.1:{address[1]}"
    finally:
        await runner.cleanup()


async def test_a_request_that_was_worked_on_is_not_sent_again(tmp_path: Path) -> None:
    num_asked = 0

    async def late(_: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        return web.json_response({}, status=504)

    source = written(tmp_path / "in.jsonl", request("a", "/v1/completions", prompt="x"))
    async with serving(late) as url:
        ended = await run(source, tmp_path / "out.jsonl", server=url)
    assert (num_asked, ended.num_failed) == (1, 1)


async def test_a_server_that_is_not_there_ends_the_run_at_once(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", request("a"), request("b"))
    with pytest.raises(QuireError, match=r"server=http://127.0.0.1:1: cannot be reached"):
        await run(source, tmp_path / "out.jsonl", server="http://127.0.0.1:1")
    assert not list(tmp_path.glob("out*"))


async def test_a_connection_that_is_lost_is_an_error_of_its_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.cluster.tools.run_batch.run._ATTEMPTS", 1)

    async def drops(asked: web.Request) -> web.Response:
        if (await asked.json())["prompt"] == "drop":
            assert asked.transport is not None
            asked.transport.abort()
        return web.json_response({"ok": True})

    source = written(
        tmp_path / "in.jsonl",
        *(request(each, "/v1/completions", prompt=each) for each in ("drop", "keep")),
    )
    async with serving(drops) as url:
        ended = await run(source, tmp_path / "out.jsonl", server=url)
    answers = read(tmp_path / "out.jsonl")
    assert ended.num_failed == 1
    assert answers["drop"]["response"] is None
    assert answers["drop"]["error"]["message"]
    assert answers["keep"]["response"]["body"] == {"ok": True}


@pytest.mark.slow
async def test_a_request_beyond_a_limit_fails_alone_and_says_what_helps(tmp_path: Path) -> None:
    async def answer(asked: web.Request) -> web.Response:
        prompt = (await asked.json())["prompt"]
        if prompt == "slow":
            await asyncio.sleep(60)
        if prompt.isdecimal():
            text = "[" * int(prompt) + "]" * int(prompt)
            return web.Response(text=text, content_type="application/json")
        return web.json_response({"text": "x" * (2**20 if prompt == "long" else 2**19)})

    deep = [str(depth) for depth in range(880, 1000, 4)]  # Python cannot serialize some of these.
    prompts = ("long", "slow", *deep, "good")
    source = written(
        tmp_path / "in.jsonl", *(request(each, "/v1/completions", prompt=each) for each in prompts)
    )
    limits = Limits(max_answer_mib=1, timeout_s=2)
    async with serving(answer) as url:
        ended = await run(source, tmp_path / "out.jsonl", server=url, limits=limits)
    answers = read(tmp_path / "out.jsonl")
    assert (ended.num_done, set(answers)) == (len(prompts), set(prompts))
    said = {each: answers[each]["error"]["message"] for each in ("long", "slow")}
    assert said == {
        "long": "line 1: the answer is longer than 1 MiB: ask for less, or give --max-answer-mib",
        "slow": "line 2: it was not answered within 2 s: give --timeout-s",
    }
    assert answers["long"]["response"] is answers["slow"]["response"] is None
    assert len(answers["good"]["response"]["body"]["text"]) == 2**19


def test_lines_that_are_too_long_are_named_and_others_are_counted_on(tmp_path: Path) -> None:
    source, limits = tmp_path / "in.jsonl", Limits(max_line_mib=1)
    longest = json.dumps(request("a", prompt=""))
    longest = json.dumps(request("a", prompt="x" * (2**20 - len(longest) - 1)))
    assert len(check_file(written(source, json.loads(longest)), limits)) == 1
    long = json.dumps(request("b", prompt="x" * 3 * 2**20))
    source.write_text(f"{longest}\n{long}\n[]\n{long}")
    with pytest.raises(ConfigError) as raised:
        check_file(source, limits)
    too_long = "it is longer than 1 MiB: shorten it, or give --max-line-mib"
    assert f"line 2: {too_long}\n  line 3: it must be" in str(raised.value)
    assert str(raised.value).endswith(f"line 4: {too_long}")


async def test_any_text_can_be_written_and_found_again_where_a_run_was_broken_off(
    tmp_path: Path,
) -> None:
    num_asked = 0

    async def echo(asked: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        return web.json_response({"text": (await asked.json())["prompt"]})

    half = "\ud800 é"  # UTF-8 cannot encode it.
    source = written(
        tmp_path / "in.jsonl",
        *(request(each, "/v1/completions", prompt=each) for each in (half, "b")),
    )
    target, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    async with serving(echo) as url:
        await run(source, target, server=url)
        kept = target.read_bytes().splitlines(keepends=True)
        foreign = json.dumps({"custom_id": "z", "response": {"status_code": 200}}).encode()
        target.unlink()
        cut = '{"custom_id": "é'.encode()[:-1]  # Cut within a character.
        part.write_bytes(kept[0] + foreign + b"\n" + b"[" * 100_000 + b"\n" + cut)
        ended = await run(source, target, server=url, resumes=True)
    assert (num_asked, ended[:3]) == (3, (2, 0, 1))
    answers = read(target)
    assert answers.keys() == {half, "b"}
    assert answers[half]["response"]["body"] == {"text": half}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "in.jsonl"], "output_file=in.jsonl: is the input too"),
        (["-o", "none/out"], "output_file=none/out: must be a file in a folder that is there"),
        (["-o", "left"], "output_file=left: an earlier run left left.part: --resume goes on"),
        (["-o", "out", "some-model"], "model=some-model: the server has its own"),
        (["-o", "out", "--timeout-s", "0"], "--timeout-s 0.0: must be above 0, and finite"),
        (["-o", "out", "--max-line-mib", "0"], "--max-line-mib 0: must be 1 or more"),
        (["-o", "out", "--server", "ftp://x"], "--server ftp://x: must be such as http://"),
        (["-o", "out", "--server", "http://x/y"], "--server http://x/y: must be such as http://"),
        (["-o", "out", "--server", "127.0.0.1:1/v1/"], "server=http://127.0.0.1:1: cannot be re"),
    ],
)
def test_the_command_says_what_cannot_work_before_it_asks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", request("a"))
    (tmp_path / "left.part").touch()
    server = ["--server", "http://127.0.0.1:1"]
    assert main(["run-batch", "-i", "in.jsonl", *server, *arguments]) in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is not JSON"),
        ('{"custom_id": "b", "custom_id": "c"}', "line 2: .*'custom_id' stands twice"),
        ("[]", "line 2: it must be an object"),
        (json.dumps({"custom_id": "b"}), "body, method, url missing"),
        (json.dumps(request("")), "custom_id must be a text"),
        (json.dumps(request("a")), "line 2: line 1 has this custom_id too"),
        (json.dumps(request("b") | {"method": "GET"}), "method='GET': must be 'POST'"),
        (json.dumps(request("b", "/v1/audio")), "url='/v1/audio': must be one of"),
        (json.dumps(request("b", a="]")).replace('"]"', "[" * 199 + "]" * 199), "more than 200 li"),
        (json.dumps(request("b", stream=True)), "body.stream must be left out"),
    ],
)
def test_lines_that_are_no_requests_are_named_before_anything_is_sent(
    tmp_path: Path, line: str, message: str
) -> None:
    source = written(tmp_path / "in.jsonl", request("a"))
    source.write_text(f"{source.read_text()}{line}\n")
    with pytest.raises(ConfigError, match=message):
        check_file(source, LIMITS)


def test_an_empty_file_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        check_file(written(tmp_path / "in.jsonl"), LIMITS)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_file(tmp_path / "none.jsonl", LIMITS)


async def test_the_command_says_how_it_ended(
    start_cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "in.jsonl", request("a"), request("b", "/v1/completions", n=1))
    files = ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    async with start_cluster(num_groups=1) as cluster:
        asked = ["run-batch", *files, "--server", cluster.http_url]
        assert await asyncio.to_thread(main, asked) == 1
    told = capsys.readouterr()
    assert "2 requests in" in told.out
    assert "1 failed" in told.out
    assert "the first that failed is b: HTTP 400: prompt: Field req" in told.err


async def test_a_key_that_the_server_does_not_know_ends_the_run_before_it_begins(
    start_cluster: Any, tmp_path: Path
) -> None:
    source = written(tmp_path / "in.jsonl", request("a"))
    keys = ApiKeys({"theirs": Caller(tenant="acme")})
    async with start_cluster(num_groups=1, keys=keys) as cluster:
        for key in (None, "wrong"):
            with pytest.raises(QuireError, match="set QUIRE_API_KEY"):
                await run(source, tmp_path / "out.jsonl", server=cluster.http_url, api_key=key)
        flags = ["--server", cluster.http_url, "--api-key", "theirs"]
        flags += ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
        assert await asyncio.to_thread(main, ["run-batch", *flags]) == 0
    assert read(tmp_path / "out.jsonl").keys() == {"a"}


def test_a_key_without_a_server_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["-i", str(written(tmp_path / "in.jsonl", request("a"))), "-o", str(tmp_path / "out")]
    assert main(["run-batch", *files, "--api-key", "theirs"]) == 2
    assert "--api-key: is of --server" in capsys.readouterr().err
