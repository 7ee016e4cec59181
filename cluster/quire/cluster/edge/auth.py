"""Who may call: clients that show a gateway one of its API keys, and gateways that show a group its
token, both as ``Authorization: Bearer …``; over HTTP, ``X-API-Key: …`` is as good.

Health checks, the reference, the files of the live page and reflection of a gateway need none: they
tell nothing of what clients ask. Every key belongs to a tenant. Tenants share no cached prefix and
see no decision of each other's. Metrics, loads and the live page's events, which are of all tenants
together, want an operator's key: where little runs, they tell the lengths of one request. So do
changes of what is served.
"""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.cluster.edge.grpc_errors import refuse
from quire.cluster.edge.http_errors import error_body, worded_for
from quire.cluster.errors import NotAnOperator, Unauthenticated
from quire.worker.api.errors import ConfigError, QuireError

_OPEN_PATHS = ("/health", "/ping", "/docs", "/openapi.json")
_PAGE_PATHS = ("/ui", "/ui/", "/ui/licenses.txt")
_PAGE_FILES = "/ui/assets/"
_OPERATORS_PATHS = ("/metrics", "/ui/events", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_NO_OPERATOR = "the API key is no operator's: in the file of keys, its line is 'KEY *'"
_REFUSAL = "no API key, or one that is not known here: send 'Authorization: Bearer KEY'"

_OPERATOR = "*"
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OWN_TENANT_CHARS = 32

Handler = Any  # A grpc.RpcMethodHandler, which is generic for type checkers only.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The tenant on whose behalf a request comes."""

    tenant: str = ""
    """Has no "/" and tells nothing of a key; empty where there are no keys."""
    is_operator: bool = False
    """Sees the decisions on everyone's requests."""

    @property
    def sees(self) -> str | None:
        """The tenant whose decisions it sees; ``None`` is all of them."""
        return None if self.is_operator else self.tenant


EVERYONE = Caller(is_operator=True)
"""The caller of a gateway without keys."""


class ApiKeys:
    """The keys that are let in, and whose they are."""

    def __init__(self, callers: Mapping[str, Caller]) -> None:
        # Digests have one length, so that comparing them takes one time.
        self._callers = [(_digest(key), caller) for key, caller in callers.items()]

    @classmethod
    def of_token(cls, token: str) -> Self:
        """One key that tells no tenants apart."""
        return cls({token: EVERYONE})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads one key a line; blank lines and those that begin with # do not count.

        Behind a key and a space may stand the name of its tenant, which several keys may share; or
        ``*``, for an operator's. A key without either is a tenant of its own.

        Raises:
            ConfigError: The file cannot be read, has no key, or a line is not like that.
        """
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file={str(path)!r} cannot be read: {error}") from error
        callers: dict[str, Caller] = {}
        for number, line in enumerate(lines, 1):
            if not line or line.startswith("#"):
                continue
            # No message has a part of the line: the start's log is not for keys.
            key, *rest = line.split()
            if len(rest) > 1 or (rest and rest != [_OPERATOR] and not _TENANT.fullmatch(rest[0])):
                raise ConfigError(
                    f"api_keys_file={str(path)!r}, line {number}: must be KEY, KEY TENANT or KEY *;"
                    " a tenant's name has up to 64 letters, digits, '.', '_' and '-'"
                )
            if key in callers:
                raise ConfigError(
                    f"api_keys_file={str(path)!r}, line {number}: an earlier line has this key"
                )
            is_operator = rest == [_OPERATOR]
            tenant = rest[0] if rest and not is_operator else _own_tenant(key)
            callers[key] = Caller(tenant=tenant, is_operator=is_operator)
        if not callers:
            raise ConfigError(f"api_keys_file={str(path)!r} has no key: write one a line")
        return cls(callers)

    def caller(self, authorization: str | None) -> Caller | None:
        """Whose request has this header; ``None``: it must not go on."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        found = None
        # Looks at every key: how long it takes must not tell which one was close.
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found if scheme.lower() == "bearer" else None


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
        # Of the kind that waits for no message of the client's.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Handler:
        is_open = details.method.startswith(self._open)
        if is_open or self._keys.caller(_authorization(details.invocation_metadata)) is not None:
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

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or _is_open(scope)
        caller = None if is_open else self._caller(Headers(scope=scope))
        if caller is None and not is_open:
            await _refusal(scope, Unauthenticated(_REFUSAL), status=401)(scope, receive, send)
        elif caller is not None and not caller.is_operator and scope["path"] in _OPERATORS_PATHS:
            await _refusal(scope, NotAnOperator(_NO_OPERATOR), status=403)(scope, receive, send)
        else:
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller | None:
        """Anthropic's clients show the key in a header of its own."""
        caller = self._keys.caller(headers.get("authorization"))
        if caller is None and "x-api-key" in headers:
            caller = self._keys.caller(f"Bearer {headers['x-api-key']}")
        return caller


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
    """The same of a call that `GrpcAuth` let in."""
    if keys is None:
        return EVERYONE
    caller = keys.caller(_authorization(context.invocation_metadata()))
    assert caller is not None, "it was let in"
    return caller


def check_operator(context: grpc.aio.ServicerContext[object, object], keys: ApiKeys | None) -> None:
    """Raises NotAnOperator: the call, which `GrpcAuth` let in, is a tenant's."""
    if not grpc_caller(context, keys).is_operator:
        raise NotAnOperator(_NO_OPERATOR)


def _refusal(scope: Scope, error: QuireError, *, status: int) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    body = worded_for(scope["path"], error_body(error), status=status)
    return JSONResponse(body, status_code=status, headers=headers)


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    return str(dict(metadata or ()).get("authorization"))


def _own_tenant(key: str) -> str:
    """No name in a keys file is one of these. Not the digest by which keys are known: who is told
    the one, as groups are, must not have the other."""
    digest = hashlib.sha256(b"quire tenant\0" + key.encode()).hexdigest()
    return f"#{digest[:_OWN_TENANT_CHARS]}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
