"""Unmodified clients that ask for HTTP/2 by an upgrade: the JDK's `HttpClient` and curl."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.anyio

HERE = Path(__file__).parent
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]})


def content(answer: str) -> str:
    text: str = json.loads(answer)["choices"][0]["message"]["content"]
    return text


@pytest.mark.slow
async def test_a_jdk_client_chats(printed: Callable[..., Any]) -> None:
    java = shutil.which("java")
    if java is None or shutil.which("javac") is None:
        pytest.skip("no JDK is installed")
    command = [java, "-Xshare:auto", "-XX:TieredStopAtLevel=1", HERE / "java" / "Chat.java"]
    told = await printed(HERE, lambda base_url: [*command, base_url], says=["that is that"])
    *whole, stream = told.split("\n", 2)
    assert [content(answer) for answer in whole] == ["that is that"] * 2
    events = [line.removeprefix("data: ") for line in stream.split("\n") if line.strip()]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "that is that"


CHUNKED = ["--header", "Transfer-Encoding: chunked"]


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    "options",
    [["--http2"], ["--http2", *CHUNKED], ["--http1.1"], ["--http1.1", *CHUNKED], ["--http1.0"]],
    ids=" ".join,
)
async def test_curl_chats(printed: Callable[..., Any], options: list[str]) -> None:
    curl = shutil.which("curl")
    if curl is None or "HTTP2" not in subprocess.check_output([curl, "--version"], text=True):
        pytest.skip("no curl that speaks HTTP/2 is installed")
    command = [curl, "--silent", *options, "--json", BODY]
    told = await printed(
        HERE, lambda base_url: [*command, f"{base_url}/chat/completions"], says=["that is that"]
    )
    assert content(told) == "that is that"
