"""API keys: clients show one to a gateway, and gateways show a group its token. Both travel as
``Authorization: Bearer …`` or ``X-API-Key: …``.

Each route and each gRPC method declares who may call it (`access`). A gateway's health checks, API
reference, live-page files and gRPC reflection need no key: they reveal nothing of what clients ask.
Every key belongs to a tenant. Tenants share no cached prefix and see none of each other's routing
decisions. Metrics, loads and the live page's events cover all tenants together and need an
operator's key: with little traffic, they reveal the lengths of single requests. Changes of what is
served need one too.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.cluster.edge.access import EVERYONE, REFUSAL, Access, Caller, check_access
from quire.cluster.edge.error_kinds import kind_of
from quire.cluster.edge.grpc_errors import Context, refuse
from quire.cluster.edge.http_errors import error_response
from quire.cluster.errors import NotAnOperator, Unauthenticated
from quire.cluster.features.tenants.keys_file import KeysFile, KnownKey, digest, read_keys_file
from quire.cluster.features.tenants.limits import TenantPolicy
from quire.cluster.serving.bounds import Turns
from quire.worker.request.errors import ConfigError, InvalidRequest

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 3.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_Signature = tuple[int, int, int, int]
Handler = Any  # A grpc.RpcMethodHandler; only type checkers see it as generic.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class ApiKeys:
    """The accepted keys and their owners. Keys from a file are read again when the file changes."""

    def __init__(self, callers: Mapping[str, Caller], *, path: Path | None = None) -> None:
        """``path``: a file whose keys are used instead of ``callers``. Raises ConfigError if it
        cannot be used."""
        self.loaded_s = time.time()
        """When the keys in use were read, in seconds since 1970."""
        self.trouble = ""
        """Why the file's present content is not used; "" if it is."""
        self._path = path
        self._seen: _Signature | None = None
        self._watchers: list[Callable[[], None]] = []
        if path is None:
            known = {digest(key): KnownKey(caller) for key, caller in callers.items()}
            self._file = KeysFile(known)
        else:
            self._seen = _signature(path)
            self._file = read_keys_file(path)

    @classmethod
    def of_token(cls, token: str) -> Self:
        """A single key that does not distinguish tenants."""
        return cls({token: EVERYONE})

    @classmethod
    def load(cls, path: Path) -> Self:
        """The keys of a file (see `keys_file`). Raises ConfigError if it cannot be used."""
        return cls({}, path=path)

    @property
    def policies(self) -> Mapping[str, TenantPolicy]:
        """The limits of each tenant."""
        return self._file.policies

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` each time a changed file has been read."""
        self._watchers.append(on_change)

    async def follow(self) -> None:
        """Checks the file for changes until cancelled. If the new file is bad, the old keys stay in
        use. Running requests continue, but for streams without an end (`operates_http`); new
        requests need a key of the new file."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Reads the file if it has changed."""
        if self._path is None:
            return
        seen = await asyncio.to_thread(_signature, self._path)
        if seen == self._seen:
            return
        try:
            self._file = await asyncio.to_thread(read_keys_file, self._path)
        except ConfigError as error:
            if str(error) != self.trouble:
                _log.error("the new file of API keys is not used, the former one is: %s", error)
            self._seen, self.trouble = seen, str(error)
            return
        self._seen, self.trouble, self.loaded_s = seen, "", time.time()
        _log.info("%d API keys are read again from %s", len(self._file.keys), self._path)
        for on_change in self._watchers:
            on_change()

    def caller(self, authorization: str | None, x_api_key: str | None = None) -> Caller | None:
        """The owner of the key in these headers; ``None`` if the request must be refused."""
        scheme, _, key = (authorization or "").partition(" ")
        found = self._known(key.strip()) if scheme.lower() == "bearer" else None
        if found is None and x_api_key:
            # Anthropic's clients send the key in a header of its own.
            found = self._known(x_api_key.strip())
        return found

    def _known(self, key: str) -> Caller | None:
        # Looked up by digest, so that the time it takes does not reveal how close a guess is to a
        # key.
        known = self._file.keys.get(digest(key))
        return known.caller if known is not None and time.time() < known.expires_s else None


_CALLER: ContextVar[Caller] = ContextVar("caller", default=EVERYONE)
_CALLER_NOW: ContextVar[Callable[[], Caller | None]] = ContextVar("caller_now")


class GrpcAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without a key as UNAUTHENTICATED with ``why``, and those that the caller may
    not make as PERMISSION_DENIED.

    ``access``: who may make each call, by its path; other calls are for operators. ``keys``: the
    accepted keys; without them, every caller is `EVERYONE`. ``refused`` receives the peer of each
    call without a key, as gRPC writes it. ``turns``: the turns in which calls begin, but open ones.
    """

    def __init__(
        self,
        keys: ApiKeys | None,
        *,
        access: Mapping[str, Access] | None = None,
        why: str = REFUSAL,
        refused: Callable[[str], object] = lambda peer: None,
        turns: Turns | None = None,
    ) -> None:
        self._keys = keys
        self._turns = turns
        self._access = access or {}
        self._why = why
        self._refused = refused

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        caller_now = partial(self._caller, details.invocation_metadata)
        _CALLER_NOW.set(caller_now)
        caller = caller_now()
        if caller is not None:
            _CALLER.set(caller)
        access = self._access.get(details.method, Access.OPERATOR)
        if handler is None:  # There is no such method, as gRPC tells those with a key.
            access = Access.KEY
        try:
            check_access(access, caller)
        except (Unauthenticated, NotAnOperator) as error:
            return self._refusal(error)
        if self._turns is not None and caller is not None and access is not Access.OPEN:
            await self._turns.take(caller.tenant)
        return handler

    def _caller(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller | None:
        if self._keys is None:
            return EVERYONE
        given = dict(metadata or ())
        return self._keys.caller(str(given.get("authorization")), str(given.get("x-api-key", "")))

    def _refusal(self, error: Unauthenticated | NotAnOperator) -> Handler:
        is_stranger = isinstance(error, Unauthenticated)
        code = kind_of(error).grpc_code
        why, reason = str(error), kind_of(error).reason
        if is_stranger:
            why, reason = self._why, code.name

        async def answer(requests: object, context: Context) -> None:
            if is_stranger:
                self._refused(context.peer())
            await refuse(context, code, reason, why)

        # A handler of this kind refuses before the client has sent a message.
        return grpc.stream_stream_rpc_method_handler(answer)


class HttpAuth:
    """Finds the caller of each request, for the routes that check it (`routes.ApiRoute`). A path
    with a control character is refused here: it has no use but to look like another path."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys | None,
        headers: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        """``keys``: the accepted keys; without them, every caller is `EVERYONE`. ``headers``: extra
        headers for each answer to the given tenant."""
        self._app = app
        self._keys = keys
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _CONTROL.search(scope["path"]):
            error = InvalidRequest("the path has a control character: no path here has one")
            await error_response(error)(scope, receive, send)
            return
        caller_now = partial(self._caller, Headers(scope=scope))
        caller = caller_now()
        scope.setdefault("state", {}).update(caller=caller, caller_now=caller_now)

        async def send_with_headers(message: Message) -> None:
            if caller is not None and message["type"] == "http.response.start":
                # By now the request itself is counted.
                MutableHeaders(scope=message).update(self._headers(caller.tenant))
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _caller(self, headers: Headers) -> Caller | None:
        if self._keys is None:
            return EVERYONE
        return self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))


def http_caller(request: Request) -> Caller:
    """The caller of a request, at a route that needs a key."""
    caller: Caller | None = request.state.caller
    assert caller is not None, "an open route tells nothing of what clients ask"
    return caller


def grpc_caller() -> Caller:
    """The caller of the running gRPC call, found by `GrpcAuth`; `EVERYONE` without a known key."""
    return _CALLER.get()


def operates_http(request: Request) -> Callable[[], bool]:
    """Whether the key of a request is an operator's at the time of each call, for streams without
    an end: a key can be withdrawn."""
    return partial(_is_operator, request.state.caller_now)


def operates_grpc() -> Callable[[], bool]:
    """The same for the running gRPC call."""
    return partial(_is_operator, _CALLER_NOW.get())


def _is_operator(caller_now: Callable[[], Caller | None]) -> bool:
    caller = caller_now()
    return caller is not None and caller.is_operator


def _signature(path: Path) -> _Signature | None:
    """A value that changes with the file; ``None`` if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
