"""Reads a request's body within limits on memory and time.

    not JSON         415, unread
    too long         413; unread if its length is announced
    gzip, deflate    unpacked as it arrives, up to the same length; other encodings are 415
    many at a time   wait, of which at most 64 KiB are read, until others are done (`Budget`), at
                     most a while, then 429; each tenant has a share
    slow             408 if the body is large: it holds memory that its tenant's others wait for
    too many parts   400, unparsed: a parsed ``[[],[],…`` takes 20 times its size in memory

After an answer to a body that was not read to its end, the connection is closed.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import numpy as np
from pydantic_core import from_json
from starlette.requests import Request

from quire.cluster.edge.auth import http_caller
from quire.cluster.edge.error_kinds import BodyTooLarge, BodyTooSlow, NotJson
from quire.cluster.edge.served_fields import Body
from quire.cluster.errors import Overloaded
from quire.cluster.serving.bounds import Budget, Hold, Turns
from quire.worker.request.errors import InvalidRequest

B = TypeVar("B", bound=Body)

MAX_BODY_BYTES = 8 * 2**20
SMALL_BODY_BYTES = 2**16
"""Bodies up to this size do not count: the server holds as much for each connection anyway."""
WAIT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0
_PAUSE_S = 0.005  # The interval at which Python switches between threads.

# Within these limits, a body is parsed and checked in at most 0.2 s, which blocks all else.
MAX_PARTS = {
    b"[{": (50_000, "lists and objects"),
    b":": (100_000, "keys"),
    b",": (2**20 + 50_000, "values"),
}
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[{:,"')
_JSON_TYPE = re.compile(r"application/(json|[^;\s]+\+json)\s*(;|$)", re.IGNORECASE)


class BodyReader:
    """Reads and checks the bodies of one gateway's requests."""

    def __init__(
        self,
        budget: Budget,
        *,
        turns: Turns | None = None,
        ignore_unknown_fields: bool = False,
        refused: Callable[[], object] = lambda: None,
    ) -> None:
        """``turns``: those of all the gateway's calls. ``ignore_unknown_fields``: whether unknown
        fields are ignored; otherwise they are refused. ``refused`` is called before `Overloaded` is
        raised."""
        self._budget = budget
        self._turns = turns or Turns()
        self._ignore_unknown_fields = ignore_unknown_fields
        self._refused = refused
        self._turn = Budget(1)

    async def read(self, request: Request, body_type: type[B]) -> tuple[B, Hold]:
        """The body, and the memory budget that it holds until the caller releases it.

        Raises:
            NotJson, BodyTooLarge, BodyTooSlow, Overloaded: As `read_json`.
            InvalidRequest, ValidationError: The body does not fit ``body_type``.
        """
        value, hold = await read_json(
            request, self._budget, turns=self._turns, turn=self._turn, refused=self._refused
        )
        try:
            async with self.in_turn(hold):
                return self._validated(value, body_type), hold
        except BaseException:
            hold.release()
            raise

    def in_turn(self, hold: Hold) -> AbstractAsyncContextManager[None]:
        """Serializes work that takes long for a large body and cannot leave the event loop."""
        return in_turn(self._turn, hold)

    def _validated(self, value: object, body_type: type[B]) -> B:
        """Validates the parsed value instead of the JSON text: an error keeps its input, and
        validation from JSON would build that input again for each error."""
        if not isinstance(value, dict):
            raise InvalidRequest("the body must be a JSON object")
        body_type.check_served(value, ignore_unknown=self._ignore_unknown_fields)
        body = body_type.model_validate(value)
        body.note_ignored(value)
        body.check()
        return body


async def read_json(
    request: Request,
    budget: Budget,
    *,
    turns: Turns,
    turn: Budget,
    refused: Callable[[], object] = lambda: None,
) -> tuple[object, Hold]:
    """The body's value, and the part of ``budget`` that it holds until the caller releases it.

    A body holds nothing before more than `SMALL_BODY_BYTES` of it have come, then its announced
    length, and once it is whole its own length. If bytes were counted as they come, bodies that are
    half read could wait for each other. Each body is parsed in its tenant's ``turns``, large ones
    also one at a time, in ``turn``. ``refused`` is called before `Overloaded` is raised.

    Raises:
        NotJson: The Content-Type is not JSON, or the encoding is not known.
        BodyTooLarge: The body is longer than `MAX_BODY_BYTES`.
        BodyTooSlow: The body did not arrive within `READ_TIMEOUT_S`.
        Overloaded: Other bodies took all memory for longer than `WAIT_TIMEOUT_S`.
        InvalidRequest: The body is not readable JSON, or has too many parts.
    """
    request.state.body_is_unread = True  # Read by the error's answer.
    _check_type(request)
    unpack = _unpacking(request)
    announced = _announced(request) if unpack is None else 0
    hold = Hold(tenant=http_caller(request).tenant)
    try:
        data = bytearray()
        async with asyncio.timeout(None) as end:
            async for piece in request.stream():
                data += piece if unpack is None else unpack(piece)
                if len(data) > MAX_BODY_BYTES:
                    raise _too_large()
                if not hold.amount and len(data) > SMALL_BODY_BYTES:
                    hold = await _take(budget, announced or MAX_BODY_BYTES, hold.tenant, refused)
                    end.reschedule(asyncio.get_running_loop().time() + READ_TIMEOUT_S)
        hold.shrink(len(data))
        request.state.body_is_unread = False
        await turns.take(hold.tenant)
        async with in_turn(turn, hold):
            return await _parse(data), hold
    except TimeoutError:
        hold.release()
        raise BodyTooSlow(f"the body was not sent within {READ_TIMEOUT_S:g} s") from None
    except BaseException:
        hold.release()
        raise


@asynccontextmanager
async def in_turn(turn: Budget, hold: Hold) -> AsyncIterator[None]:
    """Serializes work on large bodies, which takes long and cannot leave the event loop. Between
    two turns, everything else that waits for the loop has run. ``hold``: what the body holds."""
    if not hold.amount:
        yield
        return
    with await turn.take(1, hold.tenant):
        await asyncio.sleep(_PAUSE_S)
        yield


def _check_type(request: Request) -> None:
    given = request.headers.get("content-type")
    if given is None and "origin" not in request.headers:
        return  # Sent by programs, not pages: a page's requests without preflight have an Origin.
    if given is None or not _JSON_TYPE.match(given.strip()):
        raise NotJson(
            f"Content-Type is {given!r}: the body must be JSON, and the request say so with the "
            "header Content-Type: application/json"
        )


def _unpacking(request: Request) -> Callable[[bytes], bytes] | None:
    """The function that unpacks the body's pieces; ``None`` if they are not encoded. The function
    raises BodyTooLarge and InvalidRequest. Raises NotJson if the encoding is not known."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding not in _WINDOW_BITS:
        raise NotJson(
            f"Content-Encoding is {encoding[:64]!r}: must be {', '.join(_WINDOW_BITS)} or absent"
        )
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    left = MAX_BODY_BYTES

    def unpack(piece: bytes) -> bytes:
        nonlocal left
        try:
            data = stream.decompress(piece, left + 1)
        except zlib.error as error:
            raise InvalidRequest(f"the body cannot be read as {encoding}: {error}") from error
        left -= len(data)
        if left < 0:
            raise _too_large()
        return data

    return unpack


def _announced(request: Request) -> int:
    """The announced length in bytes; 0 if unknown. Raises BodyTooLarge."""
    given = request.headers.get("content-length", "0")
    num_bytes = int(given) if given.isascii() and given.isdigit() and len(given) < 20 else 0
    if num_bytes > MAX_BODY_BYTES:
        raise _too_large()
    return num_bytes


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")


async def _take(budget: Budget, num_bytes: int, tenant: str, refused: Callable[[], object]) -> Hold:
    try:
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            return await budget.take(num_bytes, tenant)
    except TimeoutError:
        refused()
        raise Overloaded(
            f"other large requests took all memory for them for {WAIT_TIMEOUT_S:g} s: try again "
            "later",
            reason="bodies",
            retry_after_s=WAIT_TIMEOUT_S,
        ) from None


async def _parse(data: bytearray) -> object:
    """The value of the JSON text ``data``. Raises InvalidRequest."""
    if len(data) > SMALL_BODY_BYTES and _many_parts(data):
        await asyncio.to_thread(_check_parts, data)  # Perhaps they are only in its strings.
    try:
        return from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON that can be read: {error}") from error


def _many_parts(data: bytes | bytearray) -> str | None:
    """The number and kind of JSON part that ``data`` has too many of, inside strings too; or
    ``None``."""
    for characters, (limit, name) in MAX_PARTS.items():
        num = sum(data.count(character) for character in characters)
        if num > limit:
            return f"{num} {name}, at most {limit}"
    return None


def _check_parts(data: bytearray) -> None:
    """Raises InvalidRequest if there are too many parts outside strings. Takes 50 ms for 8 MB and
    blocks other threads for less."""
    escaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = np.frombuffer(escaped.translate(None, _NO_STRUCTURE), dtype=np.uint8)
    is_quote = structure == ord('"')
    in_string = np.cumsum(is_quote, dtype=np.uint8) & 1  # Overflow keeps the parity.
    excess = _many_parts(structure[(in_string == 0) & ~is_quote].tobytes())
    if excess is not None:
        raise InvalidRequest(f"the body has {excess} are allowed")
