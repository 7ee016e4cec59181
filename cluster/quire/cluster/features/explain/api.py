"""``GET /v1/routing/decisions``: `ExplainRouting` over HTTP.

    ?request_id=ID   the decision on that request or one of its completions: ID is an answer's
                     ``id``, a ``Start.request_id`` or the client's own X-Request-Id
    ?limit=N         the last N decisions, newest first; 20 without either

The answer is ``{"object": "list", "data": [...]}`` of ``quire.v1.RoutingDecision`` as JSON. The
infinite cost of a group that a policy rules out is ``"Infinity"``. ``"incomplete"`` names gateways
that did not answer, if any. Any client that may send requests may ask about its own tenant's
decisions. Prompts are never shown.
"""

import asyncio

from google.protobuf.json_format import MessageToDict
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.auth import http_caller
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import Call, Heading
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.features.explain.explanations import MAX_LIMIT
from quire.cluster.gateway.models import Models
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import InvalidRequest

_PARAMETERS = ("request_id", "limit")


def routing_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    async def decisions(request: Request) -> Response:
        question = _parse(request.query_params)
        answer = await models.explanations.answer(question, tenant=http_caller(request).sees)
        # In a thread: thousands of candidates take a second, which would stall all streams.
        return await asyncio.to_thread(_response, answer)

    return [
        ApiRoute(
            "/v1/routing/decisions",
            decisions,
            methods=["GET"],
            access=Access.KEY,
            call=Call(
                "Explains routing decisions.",
                Heading.SERVER,
                query={
                    "request_id": "The id of an answer, or the client's own X-Request-Id.",
                    "limit": "How many of the latest decisions, newest first; 20 by default.",
                },
                answer={"object": "list", "data": []},
            ),
        )
    ]


def _response(answer: pb.ExplainRoutingResponse) -> Response:
    data = [
        MessageToDict(
            decision,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        for decision in answer.decisions
    ]
    incomplete = {"incomplete": answer.incomplete} if answer.incomplete else {}
    return JSONResponse({"object": "list", "data": data, **incomplete})


def _parse(query: QueryParams) -> pb.ExplainRoutingRequest:
    unknown = sorted(set(query) - set(_PARAMETERS))
    if unknown:
        raise InvalidRequest(f"{', '.join(unknown)}: unknown; there are {', '.join(_PARAMETERS)}")
    request_id, limit = query.get("request_id"), query.get("limit")
    if request_id == "":
        raise InvalidRequest(
            "request_id='' is empty: give an id, or leave it out", param="request_id"
        )
    if limit is not None and not (
        limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= MAX_LIMIT
    ):
        raise InvalidRequest(f"limit={limit!r} is out of range: 1 to {MAX_LIMIT}", param="limit")
    return pb.ExplainRoutingRequest(request_id=request_id or "", limit=int(limit or 0))
