"""Unmodified Python clients whose dependencies conflict with ours, in a separate environment."""

import asyncio
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.clients.conftest import CALL, FORM, SERVED

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "python"
PACKAGES = (
    "instructor==1.17.0",
    "litellm==1.110.2",
    "llama-index-llms-openai-like==0.8.1",
    "schemathesis==4.32.5",
)
ANIMAL = {"kind": "cat", "legs": 4}
CALLED = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of an environment that has the packages, kept for the next run."""
    # The folder is named by its packages: other versions of these tests may run at the same time.
    name = f"clients-{zlib.crc32(str(PACKAGES).encode()):08x}"
    folder = Path.home() / ".cache" / "quire" / name
    program, is_whole = folder / "bin" / "python", folder / "is-whole"
    if not is_whole.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        installed = subprocess.run(
            [program, "-m", "pip", "install", "--quiet", "--retries=1", *PACKAGES],
            capture_output=True,
            text=True,
        )
        if installed.returncode:
            pytest.skip(f"pip cannot install the clients: {installed.stderr.strip()[-300:]}")
        is_whole.touch()
    return program


@pytest.fixture
def run(printed: Callable[..., Any], python: Path) -> Callable[..., Any]:
    """``run(program, *cases, says=texts)`` → its output when the model answers ``texts``."""

    async def run_program(program: str, *cases: str, says: list[str]) -> Any:
        file = f"use_{program}.py"
        return json.loads(
            await printed(PROGRAMS, lambda base_url: [python, file, base_url, *cases], says=says)
        )

    return run_program


@pytest.mark.parametrize(
    ("modes", "says"),
    [
        (["JSON", "JSON stream", "JSON_SCHEMA", "JSON_SCHEMA stream"], FORM),
        (["MD_JSON", "MD_JSON stream"], f"```json\n{FORM}\n```"),
        (["TOOLS", "TOOLS_STRICT", "RESPONSES_TOOLS"], CALLED.format("Animal", FORM)),
        (["TOOLS stream"], CALLED.format("PartialAnimal", FORM)),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
async def test_instructor_gets_an_object(
    run: Callable[..., Any], modes: list[str], says: str
) -> None:
    assert await run("instructor", *modes, says=[says]) == [[ANIMAL] for _ in modes]


async def test_instructor_calls_tools_at_once(run: Callable[..., Any]) -> None:
    says = "\n".join([CALLED.format("Animal", FORM)] * 2)
    assert await run("instructor", "PARALLEL_TOOLS", says=[says]) == [[ANIMAL, ANIMAL]]


@pytest.mark.parametrize(
    ("cases", "says", "told"),
    [
        (["chat", "stream"], ["meow"], "meow"),
        (["tools"], [CALL, "rain"], "rain"),
        (["object"], [FORM], FORM),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
async def test_litellm(
    run: Callable[..., Any], cases: list[str], says: list[str], told: str
) -> None:
    both = [f"{provider} {case}" for case in cases for provider in ("openai", "hosted_vllm")]
    assert await run("litellm", *both, says=says) == [told] * len(both)


@pytest.mark.parametrize(
    ("cases", "says", "told"),
    [
        (["chat", "stream", "complete"], "meow", "meow"),
        (["tools"], CALL, "rain in Ulm"),
        (["object"], FORM, ANIMAL),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
async def test_llama_index(
    run: Callable[..., Any], cases: list[str], says: str, told: object
) -> None:
    assert await run("llama_index", *cases, says=[says]) == [told] * len(cases)


async def test_schemathesis_finds_no_answer_that_the_reference_does_not_know(
    start_cluster: Any, python: Path, tmp_path: Path
) -> None:
    """Sends requests derived from ``/openapi.json``, most of them invalid. None may cause a 5xx."""
    checks = (
        *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
        *("response_schema_conformance", "unsupported_method"),
    )
    async with start_cluster(**SERVED) as cluster:
        process = await asyncio.create_subprocess_exec(
            *(python.with_name("schemathesis"), "run", f"{cluster.http_url}/openapi.json"),
            *("--phases", "examples,fuzzing", "--max-examples", "20", "--seed", "1"),
            *("--checks", ",".join(checks), "--request-timeout", "60", "--warnings", "off"),
            "--no-color",
            cwd=tmp_path,  # Schemathesis stores findings in its working directory.
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
