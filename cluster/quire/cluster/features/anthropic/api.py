"""Anthropic's calls.

    POST /v1/messages                generates text
    POST /v1/messages/count_tokens   number of tokens of a prompt

The shapes are Anthropic's, errors included.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import ANSWER, MESSAGES, Call, Heading
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.text_api import metered
from quire.cluster.features.anthropic.format import MessagesFormat
from quire.cluster.features.anthropic.schema import CountTokensBody, MessagesBody
from quire.cluster.gateway.models import Models
from quire.cluster.seams import TextCall

MESSAGES_CALL = TextCall(
    path="/v1/messages",
    body=MessagesBody,
    format=MessagesFormat,
    id_prefix="msg_",
    call=Call(
        "Generates the next message of a chat (Anthropic's messages).",
        Heading.TEXT,
        MessagesBody,
        streams=True,
        example={"max_tokens": 64, "messages": MESSAGES},
        answer={
            "id": "msg_30842b151b6d5724a2e69ebe",
            "type": "message",
            "role": "assistant",
            "model": "NAME",
            "content": [{"type": "text", "text": ANSWER}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 11,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 10,
            },
        },
    ),
)


def anthropic_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    async def count_tokens(request: Request) -> Response:
        body, hold = await bodies.read(request, CountTokensBody)
        with hold:
            model = models.named(body.model)
            with metered(request, model) as tenant:
                await model.card()
                model.dialect.check(body.tool_use)
                token_ids = await model.tokenize(body.spans(), tenant=tenant)
        return JSONResponse({"input_tokens": len(token_ids)})

    return [
        ApiRoute(
            "/v1/messages/count_tokens",
            count_tokens,
            methods=["POST"],
            access=Access.KEY,
            call=Call(
                "Counts the tokens of a prompt in Anthropic's format.",
                Heading.TOKENS,
                CountTokensBody,
                example={"messages": MESSAGES},
                answer={"input_tokens": 11},
            ),
        )
    ]
