"""HTTP requests with aiohttp."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import aiohttp

from quire.cluster.tools.bench.serving.answer import RequestFailed
from quire.cluster.tools.bench.serving.config import Target
from quire.worker.request.errors import QuireError

_MOST_ERROR_BYTES = 4096
_CONNECT_S = 30.0


class Http:
    """Connections to a target: one per running request, kept for the next request."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._url = target.url(target.endpoint)

    async def __aenter__(self) -> Self:
        headers = {"Content-Type": "application/json", **self._target.headers}
        if self._target.api_key is not None:
            headers.setdefault("Authorization", f"Bearer {self._target.api_key}")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=60, ssl=not self._target.insecure
            ),
            timeout=aiohttp.ClientTimeout(
                total=self._target.timeout_s, sock_connect=min(_CONNECT_S, self._target.timeout_s)
            ),
            headers=headers,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The first listed model that generates text, or whose task is not stated.

        Raises:
            QuireError: The server lists none.
        """
        url = self._target.url("/v1/models")
        hint = "is a server there? --model names one without asking"
        try:
            async with self._session.get(url) as response:
                if response.status != 200:
                    raise await _refused(response)
                models = json.loads(await response.read())["data"]
                # Quire states each model's task; other servers do not.
                fit = [each for each in models if each.get("task") in (None, "generate")]
                return str((fit or models)[0]["id"])
        except RequestFailed as error:
            reason = str(error)
            if error.kind == "HTTP 401":
                hint = "--api-key or QUIRE_API_KEY gives one"
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(_failed(error, self._target.timeout_s))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            reason = "it lists no model"
        raise QuireError(f"{url}: {reason}; {hint}")

    async def stream(self, body: bytes) -> AsyncGenerator[bytes]:
        try:
            async with self._session.post(self._url, data=body) as response:
                if response.status != 200:
                    raise await _refused(response)
                if response.content_type != "text/event-stream":
                    raise RequestFailed("no stream of events", f"it is {response.content_type}")
                async for data in response.content.iter_any():
                    yield data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(error, self._target.timeout_s) from None


async def _refused(response: aiohttp.ClientResponse) -> RequestFailed:
    """The failure that an answer with a status other than 200 reports."""
    text = (await response.content.read(_MOST_ERROR_BYTES)).decode(errors="replace")
    message: Any = text
    try:
        told = json.loads(text)
        message = told.get("error", told)
        if isinstance(message, dict):
            message = message.get("message", text)
    except (ValueError, AttributeError, RecursionError):
        pass
    kind = f"HTTP {response.status}"
    return RequestFailed(kind, f"{kind}: {message or response.reason}")


def _failed(error: Exception, timeout_s: float) -> RequestFailed:
    match error:
        case aiohttp.ClientConnectorError():
            return RequestFailed("cannot connect", str(error))
        case asyncio.TimeoutError():
            return RequestFailed("timeout", f"no end within {timeout_s:g} s")
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return RequestFailed("disconnected", "the server closed the connection")
        case aiohttp.ClientPayloadError():
            return RequestFailed("cut off", "the connection was lost in the middle of the answer")
        case _:
            return RequestFailed(type(error).__name__, str(error))
