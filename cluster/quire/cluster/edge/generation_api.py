"""``POST`` of completions and chats, and of features' calls: generated text, whole or as a stream.

The first chunk decides the status of a stream; a later failure is an ``error`` event in the stream.
If a client disconnects, its requests are aborted.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from quire.cluster.dialects.tools import ToolUse
from quire.cluster.edge.access import Access
from quire.cluster.edge.auth import http_caller
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import ANSWER, MESSAGES, Call, Heading
from quire.cluster.edge.http_errors import error_body, error_headers
from quire.cluster.edge.openai_answer import Answer
from quire.cluster.edge.openai_format import ChatFormat, CompletionFormat, Echo, Format
from quire.cluster.edge.openai_logprobs import Logprobs
from quire.cluster.edge.openai_schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.streams import EventStream, Write, client_id, event, unless_disconnected
from quire.cluster.edge.structured import told_of
from quire.cluster.errors import DeadlineExceeded
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.service import ModelService
from quire.cluster.gateway.work import Take
from quire.cluster.seams import TextCall
from quire.cluster.serving.bounds import Hold
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.timing import server_timing
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prepared, Prompt, Request
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.text.reasoning import ReasoningFormat

TIMEOUT_HEADER = "X-Request-Timeout"
"""Timeout in seconds from the request's arrival to its last token, like ``timeout`` in the body."""
TIMING_HEADER = "X-Request-Timing"
"""With "1", the answer to a completion or chat has the timing of its steps: `timing_of`."""

_MANY_STEPS = 2**15

Run = Callable[[Take], Awaitable[None]]
"""Passes the chunks of an answer to the given function."""

_USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 10,
    "total_tokens": 21,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_HEADER = {"created": 1767225600, "model": "NAME", "system_fingerprint": "fp_273a2d7d86d4"}
COMPLETIONS = TextCall(
    path="/v1/completions",
    body=CompletionBody,
    format=CompletionFormat,
    id_prefix="cmpl-",
    call=Call(
        "Generates text after a prompt.",
        Heading.TEXT,
        CompletionBody,
        streams=True,
        example={"prompt": "The capital of France is", "max_tokens": 16},
        answer={
            "id": "cmpl-f145a9a3ca07981f1c557b04",
            "object": "text_completion",
            **_HEADER,
            "choices": [
                {
                    "index": 0,
                    "text": " Paris, the largest city of the country.",
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
)
CHAT = TextCall(
    path="/v1/chat/completions",
    body=ChatBody,
    format=ChatFormat,
    id_prefix="chatcmpl-",
    prompt_field="messages",
    call=Call(
        "Generates the next message of a chat.",
        Heading.TEXT,
        ChatBody,
        streams=True,
        example={"messages": MESSAGES},
        answer={
            "id": "chatcmpl-6a9ec4eee08c290a2e410167",
            "object": "chat.completion",
            **_HEADER,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
)


def generation_routes(
    models: Models, bodies: BodyReader, calls: Iterable[TextCall]
) -> list[ApiRoute]:
    """The routes of calls that generate text."""
    return [
        ApiRoute(
            each.path,
            partial(_generate, models, bodies, each),
            methods=["POST"],
            access=Access.KEY,
            call=each.call,
        )
        for each in calls
    ]


async def _generate(
    models: Models,
    bodies: BodyReader,
    call: TextCall,
    request: HttpRequest,
) -> Response:
    body, hold = await bodies.read(request, call.body)
    with hold:
        of_model = _OfModel(models.named(body.model))
        async with bodies.in_turn(hold):
            requests = of_model.requests(request, body)
        options = (body.stream_options or StreamOptions()) if body.stream else None
        return_token_ids, tool_use = bool(body.return_token_ids), body.tool_use
        tells_timing = request.headers.get(TIMING_HEADER) == "1"
        ignored = ", ".join(body.ignored)
        forms, echo, new_format = body.forms, Echo.of(body), call.format.of(body)
        # Frees the prompts as soon as they are token ids, not with the answer.
        del body
        answer = of_model.answer(
            requests,
            hold,
            new_format,
            prefix=call.id_prefix,
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
        reasoning = None
        use = body.tool_use
        if use is not None:
            dialect = self._gateway.dialect
            dialect.check(use)
            shown_token_ids = dialect.shown_token_ids(with_calls=bool(use.tools))
            reasoning = dialect.reasoning
        return [
            _asked_for(
                request,
                body,
                prompt=prompt,
                params=params,
                shown_token_ids=shown_token_ids,
                reasoning=reasoning,
            )
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
        """The whole answer, or a stream if ``options`` is set; its first chunk decides its status.

        Once the requests are prepared, their list is emptied and ``hold`` is released.
        """
        with told_of(forms):
            prepared = [await self._gateway.prepare(each, tool_use=tool_use) for each in requests]
        requests.clear()
        hold.release()
        params = prepared[0].sampling
        if echo is not None:
            detokenize = partial(self._gateway.detokenize, tenant=prepared[0].tenant)
            await echo.read([each.prompt_token_ids for each in prepared], detokenize)
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
        shows_output = echo is None or not echo.is_all
        run = partial(self._gateway.run, prepared, shows_output=shows_output)
        response = (
            await _collect(run, shape)
            if options is None
            else EventStream(partial(_relay, run, shape, options))
        )
        response.headers["X-Request-Id"] = reply_id  # `RequestIds` prefers the client's.
        if options is None:
            now_s = time.monotonic()
            response.headers["Server-Timing"] = server_timing(timeline.current(), now_s=now_s)
        return response

    def _answers(self, name: str, prepared: Prepared, tool_use: ToolUse | None) -> Iterator[Answer]:
        """One `Answer` for each choice of a chat's prompt; none for other requests."""
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
    """A hash of the weights (with the adapter's) and of the numerics. As long as it is unchanged,
    equal requests with equal seeds have equal answers."""
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
    reasoning: ReasoningFormat | None,
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
        reasoning=reasoning,
    )


def _timeout_s(request: HttpRequest, body: GenerationBody) -> float | None:
    """The shorter of the header's and the body's timeout. Raises InvalidRequest."""
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
    """The whole answer; after a passed deadline, an error with the part that was generated."""

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
    """Uses the encoder written in Python, during which other threads can run; `json.dumps` holds
    the GIL."""

    def render(self, content: object) -> bytes:
        return "".join(_ENCODER.iterencode(content)).encode()


async def _relay(run: Run, shape: Format, options: StreamOptions, write: Write) -> None:
    """Writes the events of a stream. A failure after the first event becomes the last event."""
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
