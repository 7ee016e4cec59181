"""Reads files of requests in OpenAI's batch format.

A line is ``{"custom_id", "method", "url", "body"}``. Only one line at a time is in memory, and its
length is bounded.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.cluster.unique_keys import read_json
from quire.worker.request.errors import ConfigError
from quire.worker.request.settings import Branch

MIB = 2**20
URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/rerank", "/v1/score", "/rerank", "/score"),
)
_FIELDS = {"custom_id", "method", "url", "body"}
_MAX_TOLD = 10
_MAX_ID_CHARS = 512
_MAX_DEPTH = 200
"""Far below the depth at which Python's JSON parser fails, which depends on the caller's stack."""
_NESTING = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')


@dataclass(frozen=True, kw_only=True)
class Limits(Branch):
    """Bounds on each line of a file.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    title = "limits"

    max_line_mib: int = 32
    """The longest line of a request, in MiB."""
    max_answer_mib: int = 64
    """The longest answer, in MiB; one that is longer fails. One answer per request in progress is
    in memory."""
    timeout_s: float = 3600.0
    """The seconds in which a request must be answered, including all attempts and the waits
    between them; one that is not fails."""

    def _check(self) -> None:
        self._must_be_at_least(1, "max_line_mib", "max_answer_mib")
        self._must_be_finite("timeout_s", above_zero=True)


class Item(NamedTuple):
    """One request of a file."""

    number: int
    """The number of the request's line in the file, from 1."""
    custom_id: str
    url: str
    body: dict[str, Any]


def check_file(path: Path, limits: Limits) -> set[bytes]:
    """Reads all of ``path``; returns a digest of the custom_id of each request.

    Raises:
        ConfigError: The file cannot be read or has no requests, or lines are invalid or too long.
            The message names the first of these lines.
    """
    wrong: list[str] = []
    known: dict[bytes, int] = {}
    num_wrong = number = 0
    for number, line in lines_of(path, max_bytes=limits.max_line_mib * MIB):
        told = (
            f"it is longer than {limits.max_line_mib} MiB: shorten it, or give --max-line-mib"
            if line is None
            else _trouble(line)
        )
        if line is not None and not told:
            digest = digest_of(json.loads(line)["custom_id"])
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


def part_of(target: Path) -> Path:
    """The file beside ``target`` that receives answers until all of them have arrived."""
    return target.with_name(f"{target.name}.part")


def lines_of(path: Path, *, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields the lines of ``path`` that are not blank, with their numbers from 1; ``None`` for a
    line longer than ``max_bytes``. Lines are bytes, because the last line of an interrupted run may
    end within a character. Raises ConfigError: the file cannot be read."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(max_bytes + 1):
                number += 1
                if len(line) <= max_bytes:
                    if line.strip():
                        yield number, line
                    continue
                while not line.endswith(b"\n") and (line := file.readline(max_bytes)):
                    pass
                yield number, None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _trouble(line: bytes) -> str:
    """Why ``line`` is not a valid request; empty if it is one."""
    try:
        read = read_json(line)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if _depth(line) > _MAX_DEPTH:
        return f"it has more than {_MAX_DEPTH} lists and objects in each other"
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


def _depth(line: bytes) -> int:
    """The depth of nested lists and objects in ``line``, which is JSON; 0 if it has no more than
    `_MAX_DEPTH` of them."""
    depth = deepest = 0
    if line.count(b"[") + line.count(b"{") <= _MAX_DEPTH:
        return 0
    for found in _NESTING.finditer(line):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


def digest_of(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
