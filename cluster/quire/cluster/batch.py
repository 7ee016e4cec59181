"""Files of requests in OpenAI's batch format, asked of a server and answered into another file.

A line of the input is ``{"custom_id", "method", "url", "body"}``; a line of the output ``{"id",
"custom_id", "response": {"status_code", "request_id", "body"}, "error"}``, in the order in which
answers come. A request that no answer came to has an ``error`` and no ``response``.

Answers are written as they come, to a file beside the output that takes its place at the end. An
input of any length takes the memory of its longest lines and of a digest of each custom_id.
"""

import asyncio
import hashlib
import json
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Set
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from quire.worker.api.errors import ConfigError, QuireError

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/rerank", "/v1/score", "/rerank", "/score"),
)
_FIELDS = {"custom_id", "method", "url", "body"}
_MAX_TOLD = 10
_MAX_ID_CHARS = 512
_MAX_SAID_CHARS = 1000
_ATTEMPTS = 6
_AGAIN = (429, 502, 503, 504)
"""Statuses with which a server has done nothing, and may later."""
_MAX_PAUSE_S = 60.0

Json = dict[str, Any]


class Item(NamedTuple):
    """One request of a file."""

    custom_id: str
    url: str
    body: Json


class Ended(NamedTuple):
    """How a file ended."""

    num_done: int
    num_failed: int
    num_skipped: int
    """Those that were answered before."""
    first_failure: str
    """Which request failed first, and why; empty where none did."""


def check_file(path: Path) -> set[bytes]:
    """Reads all of ``path``; returns a digest of the custom_id of each request.

    Raises:
        ConfigError: It cannot be read, or lines are no requests: the first ones are named.
    """
    wrong: list[str] = []
    known: dict[bytes, int] = {}
    num_wrong = number = 0
    for number, line in _lines(path):
        told = _trouble(line)
        if not told:
            digest = _digest(json.loads(line)["custom_id"])
            first = known.setdefault(digest, number)
            told = f"line {first} has this custom_id too" if first != number else ""
        if told:
            num_wrong += 1
            if len(wrong) < _MAX_TOLD:
                wrong.append(f"line {number}: {told}")
    if num_wrong:
        more = f"\n  and {num_wrong - len(wrong)} more" if num_wrong > len(wrong) else ""
        raise ConfigError(f"{path} has lines that are no requests:\n  " + "\n  ".join(wrong) + more)
    if not known:
        raise ConfigError(f"{path} has no requests: write one a line")
    return set(known)


async def run_file(
    source: Path,
    target: Path,
    *,
    server: str,
    api_key: str | None = None,
    asked: Set[bytes],
    max_concurrency: int = 256,
    resumes: bool = False,
    done: Callable[[int], object] = lambda num: None,
) -> Ended:
    """Asks ``server``, the beginning of its URLs, all requests of ``source``, whose digests
    `check_file` gave as ``asked``.

    ``resumes``: keeps what an earlier run has answered with status 200, whether it came to its end
    or not. ``done`` hears of how many have been answered.

    Raises:
        QuireError: The server cannot be reached, from the start or any more. The answers so far are
            kept for a run that resumes.
    """
    part = part_of(target)
    kept = _keep_answered(target, part, asked=asked) if resumes else set[bytes]()
    counts = Counter[bool]()
    first_failure = ""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    queue: asyncio.Queue[Item | None] = asyncio.Queue(max_concurrency)
    async with aiohttp.ClientSession(
        server, headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await _check_server(session, server)
        with part.open("a" if resumes else "w", encoding="utf-8") as out:

            async def work() -> None:
                nonlocal first_failure
                while (item := await queue.get()) is not None:
                    answer = await _ask(session, item)
                    if answer["error"]:
                        await _check_server(session, server)  # Else all that follow fail so too.
                    # One call, so that lines never mix; it is whole or, after a crash, left out.
                    # In ASCII, as texts may hold halves of surrogate pairs.
                    out.write(f"{json.dumps(answer)}\n")
                    out.flush()
                    counts[_is_good(answer)] += 1
                    if not _is_good(answer):
                        first_failure = first_failure or _failure(answer)
                    done(counts.total())

            async def feed() -> None:
                for _, line in _lines(source):
                    read = json.loads(line)
                    if _digest(read["custom_id"]) not in kept:
                        await queue.put(Item(read["custom_id"], read["url"], read["body"]))
                for _ in range(max_concurrency):
                    await queue.put(None)

            tasks = [asyncio.create_task(each()) for each in (feed, *[work] * max_concurrency)]
            try:
                await asyncio.gather(*tasks)  # Raises the first error itself, not in a group.
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    part.rename(target)
    return Ended(counts.total() + len(kept), counts[False], len(kept), first_failure)


def part_of(target: Path) -> Path:
    """Where answers are until all are there."""
    return target.with_name(f"{target.name}.part")


async def _check_server(session: aiohttp.ClientSession, server: str) -> None:
    """Raises QuireError: it cannot be reached, or refuses the key. What else it answers does not
    matter."""
    try:
        async with session.get("/v1/models") as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise QuireError(
                    f"server={server}: it wants an API key, and this one is missing or not known "
                    "there: set QUIRE_API_KEY"
                )
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise QuireError(f"server={server}: cannot be reached: {reason}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Those that are not blank, with their numbers. They are bytes, as the last one of a run that
    was broken off may end within a character. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _trouble(line: bytes) -> str:
    """Why it is no request; empty where it is one."""
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if not isinstance(read, dict) or not read.keys() >= _FIELDS:
        missing = _FIELDS - read.keys() if isinstance(read, dict) else _FIELDS
        return f"it must be an object; {', '.join(sorted(missing))} missing"
    custom_id = read["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        return f"custom_id must be a text of 1 to {_MAX_ID_CHARS} characters"
    if read["method"] != "POST":
        return f"method={str(read['method'])[:64]!r}: must be 'POST'"
    if read["url"] not in URLS:
        return f"url={str(read['url'])[:64]!r}: must be one of {', '.join(URLS)}"
    if not isinstance(read["body"], dict):
        return "body must be an object"
    if read["body"].get("stream"):
        return "body.stream must be left out: answers are written whole"
    return ""


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def _is_good(answer: Json) -> bool:
    response = answer.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def _failure(answer: Json) -> str:
    """Which request it was, and why it failed, as a terminal may show it."""
    response = answer["response"]
    if response is None:
        said = answer["error"]["message"]
    else:
        body = response["body"]
        told = body.get("error") if isinstance(body, dict) else None
        why = told.get("message") if isinstance(told, dict) else body
        said = f"HTTP {response['status_code']}: {why}"
    shown = "".join(filter(str.isprintable, f"{answer['custom_id']}: {said}"))
    return shown[:_MAX_SAID_CHARS]


def _keep_answered(target: Path, part: Path, *, asked: Set[bytes]) -> set[bytes]:
    """Writes to ``part`` what it or ``target`` has of good answers to what is ``asked``; returns
    which these are."""
    kept: set[bytes] = set()
    fresh = part.with_name(f"{part.name}.{os.getpid()}")
    with fresh.open("wb") as out:
        for path in (part, target):
            if not path.exists():
                continue
            for _, line in _lines(path):
                # What is cut off, say, is left out.
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    answer = json.loads(line)
                    digest = _digest(answer["custom_id"])
                    if _is_good(answer) and digest in asked and digest not in kept:
                        kept.add(digest)
                        out.write(line.rstrip() + b"\n")
    fresh.rename(part)
    return kept


async def _ask(session: aiohttp.ClientSession, item: Item) -> Json:
    answer: Json = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": item.custom_id}
    async for wait_s in _pauses():
        try:
            async with session.post(item.url, json=item.body) as response:
                if response.status in _AGAIN and wait_s is not None:
                    await asyncio.sleep(_retry_after_s(response, wait_s))
                    continue
                told = (await response.read()).decode(errors="replace")
                return answer | {
                    "response": {
                        "status_code": response.status,
                        "request_id": response.headers.get("X-Request-Id", ""),
                        "body": _body(told),
                    },
                    "error": None,
                }
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if wait_s is None:
                said = {"code": type(error).__name__, "message": str(error)}
                return answer | {"response": None, "error": said}
            await asyncio.sleep(wait_s)
    raise AssertionError  # The last attempt returns.


async def _pauses() -> AsyncIterator[float | None]:
    """What to wait after each attempt; ``None`` is the last one."""
    for attempt in range(_ATTEMPTS - 1):
        yield 0.25 * 4**attempt
    yield None


def _retry_after_s(response: aiohttp.ClientResponse, otherwise_s: float) -> float:
    given = response.headers.get("Retry-After", "")
    return min(float(given), _MAX_PAUSE_S) if given.isdecimal() else otherwise_s


def _body(text: str) -> Any:
    """An answer's JSON; as text where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
