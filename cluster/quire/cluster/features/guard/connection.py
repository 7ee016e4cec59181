"""One HTTP connection of a client: uvicorn's protocol, with deadlines for the client.

    waiting   the head of its next request is not complete; also before the first request
    active    the head of a request is complete; its body is being read or answered

Each connection is in one of these two states. Deadlines limit the head, the body and the time
between requests, and arriving bytes do not extend them; an answer has no deadline, however long its
stream. Data read before a request is handed on is bounded: a head in bytes and headers, and
likewise chunk extensions and trailers.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

import httptools
from starlette.responses import Response
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from quire.cluster.edge.call_records import Finish, ended
from quire.cluster.edge.error_kinds import HeadTooLarge, UnknownExpectation
from quire.cluster.edge.http_errors import error_response
from quire.cluster.features.guard.limits import MAX_HEAD_BYTES, MAX_HEADERS, ConnectionLimits
from quire.cluster.telemetry.timeline import Timeline
from quire.worker.request.errors import InvalidRequest, QuireError

LEAVE_S = 2.0
"""How long an idle connection is kept once the gateway leaves, in seconds. A client may be sending
its next request and would find the connection closed; within this time, the answer tells it not to
send another."""
LINGER_S = 1.0
"""How long a refused client may take to read the error, in seconds. If a connection with unread
bytes were closed at once, it would be reset and the answer lost."""
_LOOK_EVERY_S = 0.05
_MAX_REFUSED = 256
"""Most connections that are being sent the "no room" answer at once; more are closed without
one."""


class OpenConnections:
    """The connections of one listener. ``len(open) <= limits.max_connections``."""

    def __init__(
        self, limits: ConnectionLimits, *, cut: Callable[[str], object], finish: Finish
    ) -> None:
        """``cut`` receives the reason of each connection that is refused or closed early: ``full``,
        ``address``, ``room``, ``head`` or ``body``. ``finish`` receives the timeline of each
        request that is answered here instead of being handed on; a connection ends with the first
        of those."""
        self.limits = limits
        self.finish = finish
        self.open: set[HttpConnection] = set()
        self.refused: set[HttpConnection] = set()
        """The connections that are being sent the "no room" answer."""
        self.cut = cut
        self._num_of: Counter[str] = Counter()  # By client address.
        self.is_leaving = False
        """Whether each answer tells the client that it is the last of its connection."""
        self._waiting: dict[HttpConnection, None] = {}  # Longest waiting first.
        self._sending: dict[HttpConnection, None] = {}  # Those in a request's body, oldest first.

    def admit(self, connection: "HttpConnection") -> bool:
        """Admits a new connection and returns whether it may stay. If there is no room, another
        one is closed for it, see `_to_close`."""
        most = self.limits.max_connections_per_address
        if most is not None and self._num_of[connection.host] >= most:
            self.cut("address")
            return False
        if len(self.open) >= self.limits.max_connections:
            other = self._to_close(connection.host)
            if other is None:
                self.cut("full")
                return False
            self.cut("room")
            other.abort()
        self.open.add(connection)
        self._num_of[connection.host] += 1
        self._waiting[connection] = None
        return True

    def _to_close(self, host: str) -> "HttpConnection | None":
        """The connection that makes room for one from ``host``. If an address has more, it is the
        one of that address that has waited longest, or the oldest whose request is not whole: slow
        uploads from one address do not shut out others. Else it is the longest waiting of all."""
        most = max(self._num_of, key=self._num_of.__getitem__)
        if self._num_of[most] > self._num_of[host] + 1:
            for each in chain(self._waiting, self._sending):
                if each.host == most:
                    return each
        return next(iter(self._waiting), None)

    @property
    def may_refuse(self) -> bool:
        """Whether one more connection may be sent the "no room" answer."""
        return len(self.refused) < _MAX_REFUSED

    def leave(self, connection: "HttpConnection") -> None:
        self.refused.discard(connection)
        if connection not in self.open:
            return
        self.open.discard(connection)
        self._num_of[connection.host] -= 1
        if not self._num_of[connection.host]:
            del self._num_of[connection.host]
        self._waiting.pop(connection, None)
        self._sending.pop(connection, None)

    def begin_leaving(self) -> None:
        """Closes each connection behind its next answer, or after some time without a request."""
        self.is_leaving = True
        for connection in self.open:
            connection.prepare_to_leave()

    async def wait_until_left(self, *, timeout_s: float) -> None:
        end_s = asyncio.get_running_loop().time() + timeout_s
        while self.open and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(_LOOK_EVERY_S)

    def set_state(
        self, connection: "HttpConnection", *, is_waiting: bool = False, is_sending: bool = False
    ) -> None:
        """Notes whether a connection waits for a request, or its client is sending a body. Has no
        effect on one that has left."""
        for applies, those in ((is_waiting, self._waiting), (is_sending, self._sending)):
            if not applies:
                those.pop(connection, None)
            elif connection in self.open:
                those.setdefault(connection, None)


class HttpConnection(HttpToolsProtocol):
    """Created when the connection is accepted, before its TLS handshake."""

    def __init__(self, *, host: str, connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.host = host
        """The client's address."""
        self.opening: asyncio.Future[object] | None = None
        """The task that opens the connection (TLS handshake included) and creates its transport."""
        self.timeout_keep_alive: float = connections.limits.idle_timeout_s  # type: ignore[assignment]
        self._connections = connections
        self._limits = connections.limits
        self._owed = ""  # What the running deadline is for: "head", "body", "end".
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._is_refused = False
        self._refusal = b""
        self._num_unparsed = 0  # Bytes since the parser last made progress.

    def begin(self) -> None:
        """Starts the deadline of the first head."""
        self._owe("head")

    def turn_away(self, refusal: bytes) -> None:
        """Sends ``refusal`` as soon as there is a transport, and reads no request."""
        self._refusal = refusal
        self._connections.refused.add(self)

    def prepare_to_leave(self) -> None:
        """Closes behind the next answer whose head says so; without a request, after `LEAVE_S`."""
        self.timeout_keep_alive = LEAVE_S
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                LEAVE_S, self.timeout_keep_alive_handler
            )
        if self._owed == "head":
            self._owe("")
            self._owe("head")

    def abort(self) -> None:
        """Leaves and closes the connection at once, whatever its state."""
        self._owe("")
        self._connections.leave(self)
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._refusal:
            self._say_last(self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owe("")
        self._connections.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_unparsed += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._num_unparsed > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        self._settle()

    def on_headers_complete(self) -> None:
        if self._asks_for_upgrade():
            return  # `_parse` feeds the head again, without the upgrade.
        self._owe("")
        self._num_unparsed = 0
        self._is_in_body = True
        problem = self._problem()
        if problem is not None:
            method, path = self.parser.get_method(), self.url.partition(b"?")[0]
            call = Timeline(method=method.decode("latin-1"), path=path.decode("latin-1"))
            self.app = self._answer(problem, call)
        super().on_headers_complete()
        self.app = self.config.loaded_app
        if self._connections.is_leaving or self.parser.should_upgrade():  # By CONNECT.
            self.cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            send = _UnchunkedAnswer(self.cycle.send, self.cycle)
            self.cycle.send = send  # type: ignore[assignment, method-assign]

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade():
            return
        self._owe("")
        self._num_unparsed = 0
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("the request cannot be read as HTTP/1.1"))

    def _parse(self, data: bytes) -> None:
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    if not self._asks_for_upgrade():
                        return
                    # The parser read only the head: a body would belong to the other protocol.
                    data = self._head_without_upgrade() + data[upgrade.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _asks_for_upgrade(self) -> bool:
        """Whether the request's headers ask for another protocol, as JDK's `HttpClient` and ``curl
        --http2`` ask for HTTP/2. No other protocol is spoken here, so the answer ignores the
        upgrade."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _problem(self) -> QuireError | None:
        """Why a request with a complete head is not handed on; ``None`` if it is."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            return _too_large()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() != "1.0"):
            return InvalidRequest(f"the request has {num_hosts} Host headers: it must have one")
        for name, value in self.headers:
            if name == b"expect" and value.lower() != b"100-continue":
                return UnknownExpectation(
                    f"Expect: {value[:64].decode('latin-1')}: only 100-continue is known"
                )
        return None

    def _settle(self) -> None:
        """Updates whether the connection waits, and starts the deadline of its state."""
        if self._is_refused or self.transport.is_closing():
            self._connections.set_state(self, is_waiting=True)
            return
        is_answering = self.cycle is not None and not self.cycle.response_complete
        self._connections.set_state(
            self,
            is_waiting=not (self._is_in_body or is_answering),
            is_sending=self._is_in_body,
        )
        if self._is_in_body:
            self._owe("body")
        elif is_answering or self.timeout_keep_alive_task is not None:
            self._owe("")  # Between requests, uvicorn's own timer runs.
        else:
            self._owe("head")

    def _owe(self, what: str) -> None:
        """Starts the deadline for ``what`` ("" for none), unless it runs already."""
        if what == self._owed:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._owed = what
        if what:
            limits = self._limits
            head_timeout_s = limits.head_timeout_s
            if self._connections.is_leaving:
                head_timeout_s = min(head_timeout_s, LEAVE_S)
            times_s = {
                "head": head_timeout_s,
                "body": limits.body_timeout_s,
                "end": LINGER_S,
            }
            self._deadline = self.loop.call_later(times_s[what], self._on_deadline)

    def _on_deadline(self) -> None:
        what, self._owed = self._owed, ""
        if what == "body" and self.flow.read_paused:
            self._owe(what)  # Flow control paused reading: not the client's fault.
            return
        if what != "end":
            self._connections.cut(what)
        self.abort()

    def _refuse(self, error: QuireError) -> None:
        """Answers without the parser, which cannot continue after an error, and closes."""
        if self._is_refused:
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or not self._is_in_body:
                self.abort()  # In the middle of another answer.
                return
            # The error is in its body: the answer is this one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        self._say_last(raw_response(self._answer(error, Timeline())))

    def _answer(self, error: QuireError, call: Timeline) -> Response:
        """The answer to ``call``. It gets a line in the access log although it is not handed on."""
        call.client, call.endpoint, call.request_id = self.host, "other", secrets.token_hex(12)
        with ended(call, self._connections.finish):
            response = error_response(error)
            call.status = str(response.status_code)
        response.headers.update({"Connection": "close", "X-Request-Id": call.request_id})
        return response

    def _say_last(self, answer: bytes) -> None:
        """Sends the last answer of the connection. If the transport can close one direction alone,
        the receiving direction stays open for `LINGER_S`."""
        self._is_refused = True
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()
        self._owe("end")


class _UnchunkedAnswer:
    """Sends an answer over HTTP/1.0, which has no chunks: closing the connection ends the
    answer."""

    def __init__(self, send: Callable[[Any], Awaitable[None]], cycle: RequestResponseCycle) -> None:
        self._send = send
        self._cycle = cycle
        self._is_of_unknown_length = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_of_unknown_length = b"content-length" not in names
            if self._is_of_unknown_length:
                self._cycle.chunked_encoding = False
        elif self._is_of_unknown_length:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


def raw_response(response: Response) -> bytes:
    """The bytes of a response as they go over the wire."""
    head = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return STATUS_LINE[response.status_code] + head + b"\r\n" + bytes(response.body)


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(
        f"the request's head is too large: at most {MAX_HEAD_BYTES} bytes in {MAX_HEADERS} headers"
    )
