"""API keys: clients show one to a gateway, and gateways show a group its token. Both travel as
``Authorization: Bearer …`` or ``X-API-Key: …``.

A gateway's health checks, API reference, live-page files and gRPC reflection need no key: they
reveal nothing of what clients ask. Every key belongs to a tenant. Tenants share no cached prefix
and see none of each other's routing decisions. Metrics, loads and the live page's events cover all
tenants together and need an operator's key: with little traffic, they reveal the lengths of single
requests. Changes of what is served need one too.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.cluster.edge.grpc_errors import refuse
from quire.cluster.edge.http_errors import error_body, worded_for
from quire.cluster.edge.keys_file import (
    EVERYONE,
    Caller,
    KeysFile,
    KnownKey,
    digest,
    read_keys_file,
)
from quire.cluster.errors import NotAnOperator, Unauthenticated
from quire.cluster.serving.tenants import TenantPolicy
from quire.cluster.telemetry import timeline
from quire.worker.api.errors import ConfigError, QuireError

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 3.0
_OPEN_PATHS = ("/health", "/ping", "/docs", "/openapi.json")
_PAGE_PATHS = ("/ui", "/ui/", "/ui/licenses.txt")
_PAGE_FILES = "/ui/assets/"
_OPERATORS_PATHS = ("/metrics", "/ui/events", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_NO_OPERATOR = (
    "the API key is no operator's: in the file of keys, its line is 'KEY *', or its tenant has "
    "'operator: true'"
)
_REFUSAL = "no API key, or one that is not known here: send 'Authorization: Bearer KEY'"

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
        use. Running requests continue; new requests need a key of the new file."""
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


class GrpcAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without a key as UNAUTHENTICATED with ``why``, except those of
    ``open_services``.

    ``refused`` receives the peer of each refused call, as gRPC writes it.
    """

    def __init__(
        self,
        keys: ApiKeys,
        *,
        open_services: Iterable[str] = (),
        why: str = _REFUSAL,
        refused: Callable[[str], object] = lambda peer: None,
    ) -> None:
        self._keys = keys
        self._why = why
        self._refused = refused
        self._open = tuple(f"/{service}/" for service in open_services)
        # A handler of this kind refuses before the client has sent a message.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Handler:
        is_open = details.method.startswith(self._open)
        if is_open or _shown(self._keys, details.invocation_metadata) is not None:
            return await continuation(details)
        return self._refusal

    async def _refuse(
        self, requests: object, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        self._refused(context.peer())
        await refuse(context, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", self._why)


class HttpAuth:
    """Answers 401 to requests without a key, whether or not the path exists, and 403 to tenants
    that ask for data of all tenants."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        headers: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        """``headers``: extra headers for each answer to the given tenant."""
        self._app = app
        self._keys = keys
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or _is_open(scope)
        caller = None if is_open else self._caller(Headers(scope=scope))
        if caller is None and not is_open:
            await _refusal(scope, Unauthenticated(_REFUSAL), status=401)(scope, receive, send)
        elif caller is not None and not caller.is_operator and scope["path"] in _OPERATORS_PATHS:
            await _refusal(scope, NotAnOperator(_NO_OPERATOR), status=403)(scope, receive, send)
        else:
            scope.setdefault("state", {})["caller"] = caller

            async def send_with_headers(message: Message) -> None:
                if caller is not None and message["type"] == "http.response.start":
                    # By now the request itself is counted.
                    MutableHeaders(scope=message).update(self._headers(caller.tenant))
                await send(message)

            await self._app(scope, receive, send_with_headers)

    def _caller(self, headers: Headers) -> Caller | None:
        return self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))


def asks_for_a_page(headers: Headers) -> bool:
    """Whether a browser asks, to show the answer as a page."""
    return "text/html" in headers.get("accept", "")


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":  # Redirects browsers to the page; other clients need a key.
        return asks_for_a_page(Headers(scope=scope))
    return path in (*_OPEN_PATHS, *_PAGE_PATHS) or path.startswith(_PAGE_FILES)


def http_caller(request: Request) -> Caller:
    """The caller of a request that `HttpAuth` let in; `EVERYONE` where no keys are checked."""
    caller: Caller | None = getattr(request.state, "caller", EVERYONE)
    assert caller is not None, "an open path tells nothing of what clients ask"
    return caller


def check_sees_all(request: Request) -> None:
    """Raises NotAnOperator if a request that `HttpAuth` let in is not an operator's."""
    if http_caller(request).sees is not None:
        raise NotAnOperator(_NO_OPERATOR)


def grpc_caller(context: grpc.aio.ServicerContext[object, object], keys: ApiKeys | None) -> Caller:
    """The caller of a call that `GrpcAuth` let in. Raises Unauthenticated if its key has been
    revoked since."""
    if keys is None:
        return EVERYONE
    caller = _shown(keys, context.invocation_metadata())
    if caller is None:
        raise Unauthenticated(_REFUSAL)
    call = timeline.current()
    call.tenant, call.key_name = caller.tenant, caller.key_name
    return caller


def check_operator(context: grpc.aio.ServicerContext[object, object], keys: ApiKeys | None) -> None:
    """Raises NotAnOperator if a call that `GrpcAuth` let in is not an operator's, and
    Unauthenticated as `grpc_caller` does."""
    if not grpc_caller(context, keys).is_operator:
        raise NotAnOperator(_NO_OPERATOR)


def _refusal(scope: Scope, error: QuireError, *, status: int) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    body = worded_for(scope["path"], error_body(error), status=status)
    return JSONResponse(body, status_code=status, headers=headers)


def _shown(keys: ApiKeys, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller | None:
    given = dict(metadata or ())
    return keys.caller(str(given.get("authorization")), str(given.get("x-api-key", "")))


def _signature(path: Path) -> _Signature | None:
    """A value that changes with the file; ``None`` if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
