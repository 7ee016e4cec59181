"""The OpenAI-compatible HTTP API over a `Gateway`: an ASGI application.

Errors are OpenAI's: a status code and ``{"error": {message, type, param, code}}``. The status of a
stream is decided by its first chunk; what goes wrong later is an ``error`` event in the stream. A
client that goes away takes its requests with it.
"""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.cluster.auth import ApiKeys, HttpAuth
from quire.cluster.errors import DeadlineExceeded
from quire.cluster.gateway.generation import Chat, GenerationRequest
from quire.cluster.gateway.service import Gateway
from quire.cluster.http.errors import BodyTooLarge, error_body, error_handlers, error_headers
from quire.cluster.http.openai_format import ChatFormat, CompletionFormat, Format
from quire.cluster.http.openai_schema import ChatBody, CompletionBody, GenerationBody
from quire.cluster.http.routing_api import routing_route
from quire.cluster.http.streams import (
    EventStream,
    RequestIds,
    client_id,
    unless_disconnected,
)
from quire.v1 import inference_pb2 as pb
from quire.worker.errors import InvalidRequest
from quire.worker.sampling_params import SamplingParams

MAX_BODY_BYTES = 8 * 2**20
TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds from the request's arrival to its last token, as ``timeout`` in the body."""

AnyBody = TypeVar("AnyBody", bound=GenerationBody)
Chunks = AsyncGenerator[pb.GenerateResponse, None]


def build_http_app(
    gateway: Gateway, *, keys: ApiKeys | None = None, allow_origins: Sequence[str] = ()
) -> ASGIApp:
    """The application, to be served by any ASGI server in the gateway's event loop.

    ``keys``: what clients must show; without them, everyone is let in. ``allow_origins``: from
    which origins' pages browsers may call; "*" is all.
    """
    api = _Api(gateway)
    app: ASGIApp = Starlette(
        routes=[
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/v1/models/{model:path}", api.model, methods=["GET"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            routing_route(gateway.table),
            Route("/health", api.health, methods=["GET"]),
            Route("/metrics", api.metrics, methods=["GET"]),
        ],
        exception_handlers=error_handlers(),
    )
    if keys is not None:
        app = HttpAuth(app, keys=keys)
    if allow_origins:  # Around the keys: a browser asks first, and shows none.
        app = CORSMiddleware(
            app,
            allow_origins=allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return RequestIds(app)  # Outermost, so that internal errors carry the id too.


class _Api:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._gateway.check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        is_ready = self._gateway.is_ready
        body = {
            "status": "ready" if is_ready else "not ready",
            "ready_groups": self._gateway.groups.num_ready,
        }
        return JSONResponse(body, status_code=200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        metrics = self._gateway.telemetry.render()
        return Response(metrics, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def completions(self, request: Request) -> Response:
        body = await _read(request, CompletionBody)
        params = body.params()
        prompts = body.prompts()
        self._gateway.check_num_completions(len(prompts) * params.n)
        requests = [
            _generation_request(request, body, prompt=prompt, params=params) for prompt in prompts
        ]
        answer = self._answer(body, requests, CompletionFormat, prefix="cmpl")
        return await unless_disconnected(request, answer)

    async def chat_completions(self, request: Request) -> Response:
        body = await _read(request, ChatBody)
        prompt = Chat(messages=[turn.message() for turn in body.messages])
        generation_request = _generation_request(request, body, prompt=prompt, params=body.params())
        answer = self._answer(body, [generation_request], ChatFormat, prefix="chatcmpl")
        return await unless_disconnected(request, answer)

    async def _answer(
        self,
        body: GenerationBody,
        generation_requests: Sequence[GenerationRequest],
        format_type: type[Format],
        *,
        prefix: str,
    ) -> Response:
        """The whole answer; or, once its first chunk has decided its status, a stream."""
        generations = [await self._gateway.prepare(each) for each in generation_requests]
        params = generations[0].params
        reply_id = f"{prefix}-{generations[0].request_id}"
        shape = format_type(
            reply_id=reply_id,
            model=self._gateway.model,
            num_choices=len(generations) * params.n,
            num_per_prompt=params.n,
            logprobs=params.logprobs is not None,
            tokenizer=self._gateway.tokenizer,
        )
        chunks = self._gateway.stream(generations)
        response: Response
        if body.stream:
            first = await anext(chunks)
            events = _events(first, chunks, shape, include_usage=body.include_usage)
            response = EventStream(events, source=chunks)
        else:
            response = await _collect(chunks, shape)
        response.headers["X-Request-Id"] = reply_id  # Unless the client has a name for it.
        return response

    def _model(self) -> dict[str, object]:
        card = self._gateway.groups.card
        return {
            "id": self._gateway.model,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "max_model_len": card.max_model_len if card else None,
        }


async def _read(request: Request, body_type: type[AnyBody]) -> AnyBody:
    """Raises ValidationError, InvalidRequest or BodyTooLarge.

    In two steps: an error keeps the value that it is about, and made from JSON directly, each of
    several would make it anew.
    """
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body exceeds {MAX_BODY_BYTES} bytes")
    try:
        value = from_json(bytes(data))
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    body_type.check_served(value)
    body = body_type.model_validate(value)
    body.check()
    return body


def _generation_request(
    request: Request,
    body: GenerationBody,
    *,
    prompt: str | list[int] | Chat,
    params: SamplingParams,
) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        params=params,
        model=body.model,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        timeout_s=_timeout_s(request, body),
        client_id=client_id(request.headers),
    )


def _timeout_s(request: Request, body: GenerationBody) -> float | None:
    """The shorter one of the header's and the body's. Raises InvalidRequest."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return body.timeout
    try:
        timeout_s = float(given)
    except ValueError as error:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER}={given!r}: must be a number of seconds, such as 2.5"
        ) from error
    return timeout_s if body.timeout is None else min(timeout_s, body.timeout)


async def _collect(chunks: Chunks, shape: Format) -> Response:
    """The whole answer; where the deadline passed, an error with what there is of it."""
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                shape.take(chunk)
        except DeadlineExceeded as error:
            body = {**shape.whole(), **error_body(error)}
            return JSONResponse(body, status_code=504, headers=error_headers(error))
    return JSONResponse(shape.whole())


async def _events(
    first: pb.GenerateResponse, chunks: Chunks, shape: Format, *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """The data of each server-sent event."""
    try:
        chunk: pb.GenerateResponse | None = first
        while chunk is not None:
            for piece in shape.stream(chunk, include_usage=include_usage):
                yield _dumps(piece)
            chunk = await anext(chunks, None)
    except Exception as error:
        yield _dumps(error_body(error))
        return
    if include_usage:
        yield _dumps(shape.stream_usage())
    yield "[DONE]"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
