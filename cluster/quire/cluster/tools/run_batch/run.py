"""Sends the requests of a file in OpenAI's batch format to a server, and writes its answers.

A line of the output is ``{"id", "custom_id", "response": {"status_code", "request_id", "body"},
"error"}``, in the order in which answers arrive. A request without an answer within `Limits` has an
``error`` and no ``response``; the other requests go on.

Answers are written as they arrive, to a file beside the output, which replaces the output at the
end. An input of any length takes the memory of its longest lines and of a digest of each custom_id.
"""

import asyncio
import json
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Set
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from quire.cluster.tools.run_batch.file import MIB, Item, Limits, digest_of, lines_of, part_of
from quire.worker.request.errors import QuireError

_MAX_SAID_CHARS = 1000
_ATTEMPTS = 6
_AGAIN = (429, 502, 503)
"""Statuses of requests that a server did not process and that may succeed later. A 504 is not one:
the request was worked on until its time was over."""
_MAX_PAUSE_S = 60.0
_CHECK_TIMEOUT_S = 30.0
_WRITTEN = 6
"""Most bytes that one byte of an answer takes in the output: those of "\\u0001"."""

Json = dict[str, Any]


class Ended(NamedTuple):
    """The result of a run over one file."""

    num_done: int
    num_failed: int
    num_skipped: int
    """Requests that an earlier run had answered."""
    first_failure: str
    """Which request failed first, and why; empty if none did."""


async def run_file(
    source: Path,
    target: Path,
    *,
    server: str,
    api_key: str | None = None,
    asked: Set[bytes],
    limits: Limits,
    max_concurrency: int = 256,
    resumes: bool = False,
    done: Callable[[int], object] = lambda num: None,
) -> Ended:
    """Sends all requests of ``source`` to ``server``, a base URL, and writes the answers to
    ``target``. ``asked`` are the digests that `check_file` returned.

    ``resumes`` keeps the answers with status 200 of an earlier run, finished or not. ``done`` is
    called with the number of requests answered so far in this run.

    Raises:
        QuireError: The server cannot be reached, or refuses the API key. The answers so far are
            kept for a run that resumes.
    """
    part = part_of(target)
    kept = set[bytes]()
    if resumes:
        kept = _keep_answered(target, part, asked=asked, max_answer_mib=limits.max_answer_mib)
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
                    answer = await _ask(session, item, limits)
                    if answer["error"]:
                        await _check_server(session, server)  # If it is gone, all others fail too.
                    # One call, so that lines never mix; a line cut off by a crash is left out.
                    out.write(f"{_written(answer, item)}\n")
                    out.flush()
                    counts[_is_good(answer)] += 1
                    if not _is_good(answer):
                        first_failure = first_failure or _failure(answer)
                    done(counts.total())

            async def feed() -> None:
                for number, line in lines_of(source, max_bytes=limits.max_line_mib * MIB):
                    assert line is not None, "`check_file` comes first"
                    read = json.loads(line)
                    custom_id, url, body = (read[name] for name in ("custom_id", "url", "body"))
                    if digest_of(custom_id) not in kept:
                        await queue.put(Item(number, custom_id, url, body))
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


async def _check_server(session: aiohttp.ClientSession, server: str) -> None:
    """Raises QuireError: the server cannot be reached, or refuses the API key. Any other answer is
    accepted."""
    timeout = aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)
    try:
        async with session.get("/v1/models", timeout=timeout) as response:
            if response.status == HTTPStatus.UNAUTHORIZED:
                raise QuireError(
                    f"server={server}: it wants an API key, and this one is missing or not known "
                    "there: give --api-key, or set QUIRE_API_KEY"
                )
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise QuireError(f"server={server}: cannot be reached: {reason}") from None


def _is_good(answer: Json) -> bool:
    response = answer.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def _failure(answer: Json) -> str:
    """Which request failed and why, with printable characters only."""
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


def _keep_answered(
    target: Path, part: Path, *, asked: Set[bytes], max_answer_mib: int
) -> set[bytes]:
    """Writes to ``part`` the good answers to requests ``asked`` that it or ``target`` has; returns
    the digests of these requests."""
    kept: set[bytes] = set()
    fresh = part.with_name(f"{part.name}.{os.getpid()}")
    max_bytes = (_WRITTEN * max_answer_mib + 1) * MIB
    with fresh.open("wb") as out:
        for path in (part, target):
            if not path.exists():
                continue
            for _, line in lines_of(path, max_bytes=max_bytes):
                if line is None:
                    continue
                # Damaged lines, such as one that was cut off, are left out.
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    answer = json.loads(line)
                    digest = digest_of(answer["custom_id"])
                    if _is_good(answer) and digest in asked and digest not in kept:
                        kept.add(digest)
                        out.write(line.rstrip() + b"\n")
    fresh.rename(part)
    return kept


async def _ask(session: aiohttp.ClientSession, item: Item, limits: Limits) -> Json:
    """The line of the output for ``item``."""
    answer: Json = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": item.custom_id}
    answer |= {"response": None, "error": None}
    try:
        async with asyncio.timeout(limits.timeout_s):
            answer["response"] = await _response(session, item, limits.max_answer_mib * MIB)
    except TimeoutError as error:
        why = str(error) or f"it was not answered within {limits.timeout_s:g} s: give --timeout-s"
        answer["error"] = _error(item, error, why)
    except _TooLong as error:
        why = f"the answer is longer than {limits.max_answer_mib} MiB: ask for less, or give "
        answer["error"] = _error(item, error, f"{why}--max-answer-mib")
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        answer["error"] = _error(item, error, str(error))
    return answer


class _TooLong(Exception):
    """An answer is longer than `Limits.max_answer_mib`."""


async def _response(session: aiohttp.ClientSession, item: Item, max_bytes: int) -> Json:
    """The server's answer. Raises _TooLong, and any error of the last attempt."""
    async for wait_s in _pauses():
        try:
            async with session.post(item.url, json=item.body) as response:
                if response.status in _AGAIN and wait_s is not None:
                    await asyncio.sleep(_retry_after_s(response, wait_s))
                    continue
                told = bytearray()
                async for piece in response.content.iter_any():
                    told += piece
                    if len(told) > max_bytes:
                        response.close()
                        raise _TooLong
                return {
                    "status_code": response.status,
                    "request_id": response.headers.get("X-Request-Id", ""),
                    "body": _body(told.decode(errors="replace")),
                }
        except (aiohttp.ClientError, TimeoutError, OSError):
            if wait_s is None:
                raise
            await asyncio.sleep(wait_s)
    raise AssertionError  # The last attempt returns or raises.


def _error(item: Item, error: Exception, why: str) -> Json:
    code = type(error).__name__.lstrip("_")
    return {"code": code, "message": f"line {item.number}: {why}"}


def _written(answer: Json, item: Item) -> str:
    """The answer as JSON; an answer that cannot be encoded is replaced by an error."""
    try:
        return json.dumps(answer)  # In ASCII, because texts may have lone surrogates.
    except RecursionError as error:
        why = "the answer has too many lists and objects in each other"
        answer |= {"response": None, "error": _error(item, error, why)}
        return json.dumps(answer)


async def _pauses() -> AsyncIterator[float | None]:
    """Yields the pause after each attempt, in seconds; ``None`` for the last one."""
    for attempt in range(_ATTEMPTS - 1):
        yield 0.25 * 4**attempt
    yield None


def _retry_after_s(response: aiohttp.ClientResponse, otherwise_s: float) -> float:
    given = response.headers.get("Retry-After", "")
    return min(float(given), _MAX_PAUSE_S) if given.isdecimal() else otherwise_s


def _body(text: str) -> Any:
    """An answer's JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
