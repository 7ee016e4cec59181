"""The OpenAI-compatible HTTP API over a gateway's `Models`: an ASGI application.

Errors are OpenAI's: a status code and ``{"error": {message, type, param, code}}``. The status of a
stream is decided by its first chunk; what goes wrong later is an ``error`` event in the stream. A
client that goes away takes its requests with it.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.cluster.dialects.tools import ToolUse
from quire.cluster.edge.auth import ApiKeys, HttpAuth, http_caller
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call_records import HttpCalls
from quire.cluster.edge.embeddings_api import embedding_routes
from quire.cluster.edge.http_errors import error_body, error_handlers, error_headers
from quire.cluster.edge.messages_format import MessagesFormat
from quire.cluster.edge.messages_schema import MessagesBody
from quire.cluster.edge.models_api import model_routes
from quire.cluster.edge.openai_answer import Answer
from quire.cluster.edge.openai_format import (
    ChatFormat,
    CompletionFormat,
    Echo,
    Format,
)
from quire.cluster.edge.openai_logprobs import Logprobs
from quire.cluster.edge.openai_schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from quire.cluster.edge.reference import reference_routes
from quire.cluster.edge.responses_format import ResponsesFormat
from quire.cluster.edge.responses_schema import ResponsesBody
from quire.cluster.edge.routing_api import routing_route
from quire.cluster.edge.streams import (
    EventStream,
    RequestIds,
    Write,
    client_id,
    event,
    unless_disconnected,
)
from quire.cluster.edge.structured import told_of
from quire.cluster.edge.text_api import text_routes
from quire.cluster.edge.ui_api import ui_routes
from quire.cluster.edge.usage_api import usage_route
from quire.cluster.errors import DeadlineExceeded
from quire.cluster.failover.chunk import Chunk
from quire.cluster.failover.completion import Take
from quire.cluster.serving.bounds import Hold
from quire.cluster.serving.models import Models
from quire.cluster.serving.service import ModelService
from quire.cluster.serving.tenants import LIMIT_HEADERS
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.timing import server_timing
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.request import Prepared, Prompt, Request
from quire.worker.api.sampling_params import SamplingParams

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds from the request's arrival to its last token, as ``timeout`` in the body."""
TIMING_HEADER = "X-Request-Timing"
"""With "1", the answer of a completion or a chat says when what happened: `timing_of`."""

_MANY_STEPS = 2**15

Run = Callable[[Take], Awaitable[None]]
"""Hands the chunks of an answer on."""


def build_http_app(
    models: Models,
    *,
    keys: ApiKeys | None = None,
    allow_origins: Sequence[str] = (),
    ignore_unknown_fields: bool = False,
) -> ASGIApp:
    """The application, to be served by any ASGI server in the gateway's event loop.

    ``keys``: what clients must show; without them, everyone is let in. ``allow_origins``: from
    which origins' pages browsers may call; "*" is all. ``ignore_unknown_fields``: of bodies, rather
    than refuse the request.
    """
    bodies = BodyReader(
        models.bodies,
        ignore_unknown_fields=ignore_unknown_fields,
        refused=models.telemetry.refused.labels("bodies").inc,
    )
    api = _Api(models, bodies)
    routes = [
        *model_routes(models, bodies),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/messages", api.messages, methods=["POST"]),
        routing_route(models.explanations),
        usage_route(models.usage),
        *text_routes(models, bodies),
        *embedding_routes(models, bodies),
        *_own_routes(models),
    ]
    app: ASGIApp = Starlette(
        routes=[*routes, *reference_routes(routes), *ui_routes(models.live)],
        exception_handlers=error_handlers(),
    )
    if keys is not None:
        app = HttpAuth(app, keys=keys, headers=models.tenants.headers)
    if allow_origins:  # Around the keys: a browser asks first, and shows none.
        app = CORSMiddleware(
            app,
            allow_origins=allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[
                "X-Request-Id",
                "X-Ignored-Fields",
                "Retry-After",
                "Server-Timing",
                "traceresponse",
                *LIMIT_HEADERS,
            ],
        )
    # Outermost, so that internal errors carry the id too.
    paths = [route.path for route in routes]
    return HttpCalls(RequestIds(app), begin=models.began, finish=models.finished, paths=paths)


def build_metrics_app(models: Models, *, keys: ApiKeys | None) -> ASGIApp:
    """What `build_http_app` tells of the gateway itself; ``keys``: an operator's must be shown for
    metrics."""
    app = Starlette(routes=_own_routes(models), exception_handlers=error_handlers())
    return app if keys is None else HttpAuth(app, keys=keys)


def _own_routes(models: Models) -> list[Route]:
    """``/ping`` is ``/health`` by the name that some load balancers know."""

    async def health(request: HttpRequest) -> Response:
        body = {
            "status": "ready" if models.is_ready else "not ready",
            "ready_groups": models.num_ready_groups,
        }
        return JSONResponse(body, status_code=200 if models.is_ready else 503)

    async def metrics(request: HttpRequest) -> Response:
        metrics = models.telemetry.render()
        return Response(metrics, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


class _Api:
    def __init__(self, models: Models, bodies: BodyReader) -> None:
        self._models = models
        self._bodies = bodies

    async def completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, CompletionBody, CompletionFormat, prefix="cmpl-")

    async def chat_completions(self, request: HttpRequest) -> Response:
        return await self._generate(request, ChatBody, ChatFormat, prefix="chatcmpl-")

    async def responses(self, request: HttpRequest) -> Response:
        return await self._generate(request, ResponsesBody, ResponsesFormat, prefix="resp_")

    async def messages(self, request: HttpRequest) -> Response:
        return await self._generate(request, MessagesBody, MessagesFormat, prefix="msg_")

    async def _generate(
        self,
        request: HttpRequest,
        body_type: type[GenerationBody],
        format_type: type[Format],
        *,
        prefix: str,
    ) -> Response:
        body, hold = await self._bodies.read(request, body_type)
        with hold:
            of_model = _OfModel(self._models.named(body.model))
            async with self._bodies.in_turn(hold):
                requests = of_model.requests(request, body)
            options = (body.stream_options or StreamOptions()) if body.stream else None
            return_token_ids, tool_use = bool(body.return_token_ids), body.tool_use
            tells_timing = request.headers.get(TIMING_HEADER) == "1"
            ignored = ", ".join(body.ignored)
            forms, echo, new_format = body.forms, Echo.of(body), format_type.of(body)
            # The prompts go once they are token ids, not with the answer.
            del body
            answer = of_model.answer(
                requests,
                hold,
                new_format,
                prefix=prefix,
                options=options,
                return_token_ids=return_token_ids,
                echo=echo,
                forms=forms,
                tool_use=tool_use,
                tells_timing=tells_timing,
            )
            response = await unless_disconnected(request, answer)
            if ignored:
                response.headers["X-Ignored-Fields"] = ignored
            return response


class _OfModel:
    """Requests for one model."""

    def __init__(self, gateway: ModelService) -> None:
        self._gateway = gateway

    def requests(self, request: HttpRequest, body: GenerationBody) -> list[Request]:
        params, prompts = body.params(), body.prompts()
        self._gateway.check_num_completions(len(prompts) * params.n)
        shown_token_ids: frozenset[int] = frozenset()
        use = body.tool_use
        if use is not None:
            dialect = self._gateway.dialect
            dialect.check(use)
            shown_token_ids = dialect.shown_token_ids(with_calls=bool(use.tools))
        return [
            _asked_for(request, body, prompt=prompt, params=params, shown_token_ids=shown_token_ids)
            for prompt in prompts
        ]

    async def answer(
        self,
        requests: list[Request],
        hold: Hold,
        new_format: Callable[..., Format],
        *,
        prefix: str,
        options: StreamOptions | None,
        return_token_ids: bool,
        echo: Echo | None,
        forms: Mapping[str, object],
        tool_use: ToolUse | None,
        tells_timing: bool,
    ) -> Response:
        """The whole answer; or, with ``options``, a stream, whose first chunk decides its status.

        Once the requests are prepared, their list is emptied and ``hold`` released.
        """
        with told_of(forms):
            prepared = [await self._gateway.prepare(each, tool_use=tool_use) for each in requests]
        requests.clear()
        hold.release()
        params = prepared[0].sampling
        if echo is not None:
            await echo.read([each.prompt_token_ids for each in prepared], self._gateway.detokenize)
        reply_id = f"{prefix}{prepared[0].request_id}"
        shape = new_format(
            reply_id=reply_id,
            model=self._gateway.model,
            num_choices=len(prepared) * params.n,
            num_per_prompt=params.n,
            tokenizer=self._gateway.tokenizer,
            fingerprint=_fingerprint(prepared[0]),
            prompt_token_ids=[each.prompt_token_ids for each in prepared]
            if return_token_ids
            else None,
            scores=params.prompt_logprobs is not None,
            tells_timing=tells_timing,
            echo=echo,
            logprobs=[
                Logprobs.of(each, self._gateway.tokenizer)
                for each in prepared
                for _ in range(params.n)
                if params.num_logprobs >= 0
            ],
            answers=[
                answer
                for number, each in enumerate(prepared)
                for answer in self._answers(f"{reply_id}/{number}", each, tool_use)
            ],
        )
        run = partial(self._gateway.run, prepared)
        response = (
            await _collect(run, shape)
            if options is None
            else EventStream(partial(_relay, run, shape, options))
        )
        response.headers["X-Request-Id"] = reply_id  # Unless the client has a name for it.
        if options is None:
            now_s = time.monotonic()
            response.headers["Server-Timing"] = server_timing(timeline.current(), now_s=now_s)
        return response

    def _answers(self, name: str, prepared: Prepared, tool_use: ToolUse | None) -> Iterator[Answer]:
        """One for each of the prompt's choices, where it is a chat."""
        if tool_use is None:
            return
        dialect = self._gateway.dialect
        prompt = (self._gateway.tokenizer, prepared.prompt_token_ids)
        reasons = bool(dialect.reasons(*prompt))
        goes_on = reasons and dialect.goes_on(*prompt)
        for number in range(prepared.sampling.n):
            yield Answer(
                f"{name}/{number}",
                dialect=dialect,
                tool_use=tool_use,
                is_reasoning=reasons,
                goes_on=goes_on,
            )


def _fingerprint(request: Prepared) -> str:
    """Covers the weights, the adapter's too, and the numerics: equal requests with equal seeds have
    equal answers as long as it is the same."""
    card = request.model
    assert card is not None, "a gateway prepared the request"
    parts = [card.model_fingerprint, card.kv_dtype, card.numerics, request.adapter]
    digest = hashlib.sha256("\0".join(filter(None, parts)).encode())
    return f"fp_{digest.hexdigest()[:12]}"


def _asked_for(
    request: HttpRequest,
    body: GenerationBody,
    *,
    prompt: Prompt,
    params: SamplingParams,
    shown_token_ids: frozenset[int],
) -> Request:
    caller = http_caller(request)
    return Request(
        prompt=prompt,
        sampling=params,
        cache_salt=body.cache_salt or "",
        tenant=caller.tenant,
        key_name=caller.key_name,
        priority=body.priority or 0,
        cache_key=body.prompt_cache_key or "",
        keep_s=body.keep_s,
        timeout_s=_timeout_s(request, body),
        client_id=client_id(request.headers),
        shown_token_ids=shown_token_ids,
    )


def _timeout_s(request: HttpRequest, body: GenerationBody) -> float | None:
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


async def _collect(run: Run, shape: Format) -> Response:
    """The whole answer; where the deadline passed, an error with what there is of it."""

    async def take(chunk: Chunk) -> None:
        shape.take(chunk)

    try:
        await run(take)
    except DeadlineExceeded as error:
        body = shape.failed(error_body(error))
        return JSONResponse(body, status_code=504, headers=error_headers(error))
    if shape.num_steps < _MANY_STEPS:
        return JSONResponse(shape.whole())
    return await asyncio.to_thread(lambda: _LongResponse(shape.whole()))


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class _LongResponse(JSONResponse):
    """Encoded by an encoder that lets other threads run meanwhile, as `json.dumps` does not."""

    def render(self, content: object) -> bytes:
        return "".join(_ENCODER.iterencode(content)).encode()


async def _relay(run: Run, shape: Format, options: StreamOptions, write: Write) -> None:
    """Writes the events of a stream. What fails once one was written is its last event."""
    is_begun = False

    async def take(chunk: Chunk) -> None:
        nonlocal is_begun
        events = b"".join(map(event, shape.stream(chunk, options)))
        if events or not is_begun:
            is_begun = True
            await write(events)

    try:
        await run(take)
    except Exception as error:
        if not is_begun:
            raise
        await write(event(shape.stream_error(error_body(error))))
        return
    end = b"".join(map(event, shape.stream_end(options)))
    if end:
        await write(end)
