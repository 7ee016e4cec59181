"""Who may use a gateway: clients that show one of its API keys, as ``Authorization: Bearer KEY``.

Health checks, reflection and metrics need none: they tell nothing of what clients ask.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.cluster.errors import Unauthenticated
from quire.cluster.http.errors import error_body
from quire.worker.errors import ConfigError

_OPEN_PATHS = ("/health", "/metrics")
_REFUSAL = "no API key, or one that is not known here: send 'Authorization: Bearer KEY'"

Handler = Any  # A grpc.RpcMethodHandler, which is generic for type checkers only.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class ApiKeys:
    """The keys that are let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length, so that comparing them takes one time.
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads one key a line; blank lines and those that begin with # do not count.

        Raises:
            ConfigError: The file cannot be read or has no key.
        """
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file={str(path)!r} cannot be read: {error}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"api_keys_file={str(path)!r} has no key: write one a line")
        return cls(keys)

    def admit(self, authorization: str | None) -> bool:
        """Whether a request with this header may go on."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        # The sum looks at every key: how long it takes must not tell which one was close.
        num_equal = sum(hmac.compare_digest(digest, known) for known in self._digests)
        return scheme.lower() == "bearer" and num_equal > 0


class GrpcAuth(grpc.aio.ServerInterceptor):
    """Refuses calls of ``service`` without a key, as UNAUTHENTICATED."""

    def __init__(self, keys: ApiKeys, *, service: str) -> None:
        self._keys = keys
        self._prefix = f"/{service}/"
        self._refusal: Handler = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> Handler:
        authorization = dict(details.invocation_metadata).get("authorization")
        if details.method.startswith(self._prefix) and not self._keys.admit(str(authorization)):
            return self._refusal
        return await continuation(details)


class HttpAuth:
    """Answers 401 to requests without a key, whatever they ask for, known paths or not."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in _OPEN_PATHS
        if is_open or self._keys.admit(Headers(scope=scope).get("authorization")):
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse(
                error_body(Unauthenticated(_REFUSAL)),
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)


async def _refuse(request: object, context: grpc.aio.ServicerContext[object, object]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
