"""Who may call: clients that show a gateway one of its API keys, and gateways that show a group its
token, both as ``Authorization: Bearer …``; ``X-API-Key: …`` is as good.

Health checks, the reference, the files of the live page and reflection of a gateway need none: they
tell nothing of what clients ask. Every key belongs to a tenant. Tenants share no cached prefix and
see no decision of each other's. Metrics, loads and the live page's events, which are of all tenants
together, want an operator's key: where little runs, they tell the lengths of one request. So do
changes of what is served.
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
Handler = Any  # A grpc.RpcMethodHandler, which is generic for type checkers only.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class ApiKeys:
    """The keys that are let in, and whose they are. Those of a file are read again when it
    changes."""

    def __init__(self, callers: Mapping[str, Caller], *, path: Path | None = None) -> None:
        """``path``: that of a file, whose keys are let in instead of ``callers``. Raises
        ConfigError: it cannot be used."""
        self.loaded_s = time.time()
        """When the file, as it is used, was read; in seconds since 1970."""
        self.trouble = ""
        """Why the file that is there now is not used, where it is not."""
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
        """One key that tells no tenants apart."""
        return cls({token: EVERYONE})

    @classmethod
    def load(cls, path: Path) -> Self:
        """The keys of a file (`keys_file`). Raises ConfigError: it cannot be used."""
        return cls({}, path=path)

    @property
    def policies(self) -> Mapping[str, TenantPolicy]:
        """What the tenants may ask for."""
        return self._file.policies

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` when another file has been read."""
        self._watchers.append(on_change)

    async def follow(self) -> None:
        """Looks for another file until it is cancelled. A bad one leaves the former in place. Those
        who were let in stay; new requests need a key of the new file."""
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
        """Whose request has these headers; ``None``: it must not go on."""
        scheme, _, key = (authorization or "").partition(" ")
        found = self._known(key.strip()) if scheme.lower() == "bearer" else None
        if found is None and x_api_key:
            # Anthropic's clients show the key in a header of its own.
            found = self._known(x_api_key.strip())
        return found

    def _known(self, key: str) -> Caller | None:
        # By digest: how long that takes tells nothing of a key that is close to a known one.
        known = self._file.keys.get(digest(key))
        return known.caller if known is not None and time.time() < known.expires_s else None


class GrpcAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without a key as UNAUTHENTICATED with ``why``, but of ``open_services``.

    ``refused`` hears of each peer, as gRPC writes it.
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
    """Answers 401 to requests without a key, whatever they ask for, known paths or not, and 403 to
    tenants that ask for what tells of all."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        headers: Callable[[str], Mapping[str, str]] = lambda tenant: {},
    ) -> None:
        """``headers``: those that each answer to a tenant gets besides."""
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
                    # By then the request itself is counted.
                    MutableHeaders(scope=message).update(self._headers(caller.tenant))
                await send(message)

            await self._app(scope, receive, send_with_headers)

    def _caller(self, headers: Headers) -> Caller | None:
        return self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))


def asks_for_a_page(headers: Headers) -> bool:
    """Whether it is a browser that is to show the answer."""
    return "text/html" in headers.get("accept", "")


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":  # Sends browsers to the page, and is nothing to others.
        return asks_for_a_page(Headers(scope=scope))
    return path in (*_OPEN_PATHS, *_PAGE_PATHS) or path.startswith(_PAGE_FILES)


def http_caller(request: Request) -> Caller:
    """On whose behalf a request that `HttpAuth` let in comes; everyone's where there is none."""
    caller: Caller | None = getattr(request.state, "caller", EVERYONE)
    assert caller is not None, "an open path tells nothing of what clients ask"
    return caller


def grpc_caller(context: grpc.aio.ServicerContext[object, object], keys: ApiKeys | None) -> Caller:
    """The same of a call that `GrpcAuth` let in. Raises Unauthenticated: its key has been revoked
    since."""
    if keys is None:
        return EVERYONE
    caller = _shown(keys, context.invocation_metadata())
    if caller is None:
        raise Unauthenticated(_REFUSAL)
    call = timeline.current()
    call.tenant, call.key_name = caller.tenant, caller.key_name
    return caller


def check_operator(context: grpc.aio.ServicerContext[object, object], keys: ApiKeys | None) -> None:
    """Raises NotAnOperator: the call, which `GrpcAuth` let in, is a tenant's. Further as
    `grpc_caller`."""
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
    """Differs for another file; ``None`` where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino
