"""Calls that generate nothing: tokenization, detokenization, version and load.

    POST /tokenize     a text or a chat (in the model's chat template) as token ids
    POST /detokenize   token ids as text
    GET  /version      ``{"version": …}`` of this software
    GET  /load         ``{"server_load": N}``: running completions in this gateway, of all tenants

Names and shapes are vLLM's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire import __version__
from quire.cluster.edge.access import Access
from quire.cluster.edge.auth import http_caller
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import QUESTION, Call, Heading
from quire.cluster.edge.openai_schema import ChatFields, ChatTurns, TokenIds
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.served_fields import Body
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.prompts import off_loop
from quire.cluster.gateway.service import ModelService
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prompt, Text


class TokenizeBody(ChatFields):
    """vLLM's ``/tokenize``: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatTurns | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt, a text, or messages, a chat", param="prompt")

    def spans(self) -> Prompt:
        if self.messages is not None:
            return (self.chat(self.messages),)
        return (Text(self.prompt or "", add_special_tokens=self.add_special_tokens is not False),)


class DetokenizeBody(Body):
    """vLLM's ``/detokenize``."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = False


@contextmanager
def metered(request: Request, model: ModelService) -> Iterator[str]:
    """Counts a call against the limits of its tenant, which it yields, while the block runs."""
    caller = http_caller(request)
    with model.meter.metered(caller.tenant, caller.key_name):
        yield caller.tenant


def text_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    async def tokenize(request: Request) -> Response:
        body, hold = await bodies.read(request, TokenizeBody)
        with hold:
            model = models.named(body.model)
            with metered(request, model) as tenant:
                token_ids = await model.tokenize(body.spans(), tenant=tenant)
            card = await model.card()
        texts: list[str] | None = None
        if body.return_token_strs:
            text_of = model.tokenizer.token_text
            texts = await off_loop(100 * len(token_ids), lambda: [*map(text_of, token_ids)])
        answer = {
            "count": len(token_ids),
            "max_model_len": card.max_model_len,
            "tokens": list(token_ids),
            "token_strs": texts,
        }
        return await off_loop(len(token_ids), lambda: JSONResponse(answer))

    async def detokenize(request: Request) -> Response:
        body, hold = await bodies.read(request, DetokenizeBody)
        with hold:
            model = models.named(body.model)
            skips = bool(body.skip_special_tokens)
            with metered(request, model) as tenant:
                text = await model.detokenize(body.tokens, skip_special_tokens=skips, tenant=tenant)
        return JSONResponse({"prompt": text})

    async def show_version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(request: Request) -> Response:
        return JSONResponse({"server_load": models.num_inflight})

    return [
        ApiRoute(
            "/tokenize",
            tokenize,
            methods=["POST"],
            access=Access.KEY,
            call=Call(
                "Tokenizes a text or a chat.",
                Heading.TOKENS,
                TokenizeBody,
                example={"prompt": QUESTION},
                answer={
                    "count": 3,
                    "max_model_len": 1024,
                    "tokens": [0, 287, 267],
                    "token_strs": None,
                },
            ),
        ),
        ApiRoute(
            "/detokenize",
            detokenize,
            methods=["POST"],
            access=Access.KEY,
            call=Call(
                "Converts token ids to text.",
                Heading.TOKENS,
                DetokenizeBody,
                example={"tokens": [1, 2, 3]},
                answer={"prompt": "What is"},
            ),
        ),
        ApiRoute(
            "/version",
            show_version,
            methods=["GET"],
            access=Access.KEY,
            call=Call("The version of Quire.", Heading.SERVER, answer={"version": "0.1.0"}),
        ),
        ApiRoute(
            "/load",
            load,
            methods=["GET"],
            access=Access.OPERATOR,
            call=Call(
                "Completions in progress at this gateway, of all tenants. With API keys, needs an "
                "operator's key.",
                Heading.SERVER,
                answer={"server_load": 0},
            ),
        ),
    ]
