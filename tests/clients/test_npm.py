"""Unmodified clients from npm: OpenAI's and Vercel's AI SDK over chat completions and responses,
`buf curl` over gRPC."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import CALL, FORM, SERVED

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "npm"
THOUGHT = "<think>\nHm.\n</think>\n\nthat is that"
STREAMS = pytest.mark.parametrize("stream", ["", " stream"])
PROVIDERS = ["compatible", "compatible with schemas", "openai", "openai chat"]


@pytest.fixture(autouse=True, scope="session")
def _packages() -> None:
    """The packages of package-lock.json, in node_modules beside it; installed if missing."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    listed = subprocess.run([npm, "ls"], cwd=PROGRAMS, capture_output=True)
    if listed.returncode == 0:
        return
    installed = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=30000"],
        cwd=PROGRAMS,
        capture_output=True,
        text=True,
    )
    if installed.returncode:
        pytest.skip(f"npm cannot install its packages: {installed.stderr.strip()[-300:]}")


@pytest.fixture
def run(printed: Callable[..., Any]) -> Callable[..., Any]:
    """``run(program, *arguments, says=texts)`` → its output when the model answers ``texts``."""

    async def run_program(*arguments: str, says: list[str]) -> Any:
        return json.loads(
            await printed(PROGRAMS, lambda base_url: ["node", *arguments, base_url], says=says)
        )

    return run_program


@STREAMS
async def test_openai_chats(run: Callable[..., Any], stream: str) -> None:
    told = await run("openai.mjs", f"chat{stream}", says=[THOUGHT])
    assert (told["text"], told["finish_reason"]) == ("that is that", "stop")
    usage = told["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


@STREAMS
async def test_openai_responds(run: Callable[..., Any], stream: str) -> None:
    told = await run("openai.mjs", f"response{stream}", says=[THOUGHT])
    assert (told["text"], told["status"]) == ("that is that", "completed")
    usage = told["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


@pytest.mark.parametrize("case", ["chat tools", "chat tools stream", "response tools"])
async def test_openai_calls_a_tool_and_tells_its_result(run: Callable[..., Any], case: str) -> None:
    assert await run("openai.mjs", case, says=[CALL, "rain"]) == {"text": "rain", "cities": ["Ulm"]}


@pytest.mark.parametrize("case", ["chat parse", "response parse"])
async def test_openai_parses_what_a_zod_schema_describes(
    run: Callable[..., Any], case: str
) -> None:
    assert await run("openai.mjs", case, says=[FORM]) == {"kind": "cat", "legs": 4}


@pytest.mark.parametrize("case", ["chat refused", "response refused"])
async def test_openai_tells_why_it_was_refused(run: Callable[..., Any], case: str) -> None:
    told = await run("openai.mjs", case, says=[])
    assert (told["error"], told["status"]) == ("NotFoundError", 404)
    assert "other" in told["message"]


@STREAMS
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_ai_sdk_gets_a_text(run: Callable[..., Any], provider: str, stream: str) -> None:
    told = await run("ai.mjs", f"text{stream}", provider, says=[THOUGHT])
    assert (told["text"], told["finishReason"]) == ("that is that", "stop")
    if provider.startswith("compatible"):  # Only this one reads reasoning from chats.
        assert told["reasoning"] == "Hm."


@STREAMS
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_ai_sdk_calls_a_tool_and_tells_its_result(
    run: Callable[..., Any], provider: str, stream: str
) -> None:
    told = await run("ai.mjs", f"tools{stream}", provider, says=[CALL, "rain"])
    assert (told["text"], told["cities"]) == ("rain", ["Ulm"])


@STREAMS
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_ai_sdk_gets_an_object(run: Callable[..., Any], provider: str, stream: str) -> None:
    told = await run("ai.mjs", f"object{stream}", provider, says=[FORM])
    assert told == {"kind": "cat", "legs": 4}


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_ai_sdk_calls_a_tool_on_the_way_to_an_object(
    run: Callable[..., Any], provider: str
) -> None:
    told = await run("ai.mjs", "output", provider, says=[CALL, FORM])
    assert told == {"kind": "cat", "legs": 4}


@pytest.mark.parametrize(
    ("case", "provider"),
    [
        ("turns", "compatible"),
        ("turns", "compatible with schemas"),
        ("turns", "openai chat"),
        ("turns unstored", "openai"),
    ],
)
async def test_ai_sdk_goes_on_with_a_conversation(
    run: Callable[..., Any], case: str, provider: str
) -> None:
    told = await run("ai.mjs", case, provider, says=[THOUGHT, "and that"])
    assert told["text"] == "and that"


async def test_ai_sdk_uses_tools_after_a_thought_when_it_stores_nothing(
    run: Callable[..., Any],
) -> None:
    thought = f"<think>\nHm.\n</think>\n\n{CALL}"
    told = await run("ai.mjs", "tools unstored", "openai", says=[thought, "rain"])
    assert (told["text"], told["cities"]) == ("rain", ["Ulm"])


async def test_ai_sdk_is_told_that_what_it_refers_to_is_not_kept(run: Callable[..., Any]) -> None:
    """Over responses the SDK refers to items of earlier answers, unless ``store`` is off."""
    told = await run("ai.mjs", "turns refused", "openai", says=[THOUGHT])
    assert told["statusCode"] == 400
    assert "store=False" in told["message"]


async def test_buf_curl_finds_out_by_reflection_and_streams(
    start_cluster: Any, converses: Callable[..., None]
) -> None:
    converses("that is that")
    chat = {"messages": [{"role": "user", "content": "the cat"}]}
    request = {"model": "hash", "chat": chat, "sampling": {"max_tokens": 20}}
    async with start_cluster(**SERVED) as cluster:
        url = f"http://{cluster.grpc_address}"
        curl = ("curl", "--protocol", "grpc", "--http2-prior-knowledge")
        listed = await _buf(*curl, "--list-services", url)
        call = f"{url}/quire.v1.Inference/Generate"
        streamed = await _buf(*curl, "--data", json.dumps(request), call)
        refused = await _buf(
            *curl, "--data", json.dumps(request | {"model": "x"}), call, fails=True
        )
    assert "quire.v1.Inference" in listed.split()
    messages = json.loads("[" + streamed.replace("\n}\n{", "\n},{") + "]")
    assert "".join(each.get("text", "") for each in messages) == "that is that"
    assert messages[-1]["finishReason"] == "FINISH_REASON_STOP"
    assert json.loads(refused)["code"] == "not_found"


async def _buf(*arguments: str, fails: bool = False) -> str:
    """Runs `buf` and returns its output, or with ``fails`` its error."""
    process = await asyncio.create_subprocess_exec(
        PROGRAMS / "node_modules" / ".bin" / "buf",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, error = await process.communicate()
    assert bool(process.returncode) == fails, error.decode()
    return (error if fails else told).decode()
