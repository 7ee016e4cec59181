"""``GET /v1/usage``: usage of the API key's tenant, by key.

    ?tenant=NAME   usage of that tenant; without it, an operator's key shows all tenants

The answer is ``{"object": "list", "since": …, "data": [...]}`` with a row for each tenant and key:
sums since the gateways started, and ``minutes``, the usage of each minute of the last hour. Times
are in seconds since 1970.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.auth import http_caller
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import Call, Heading
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.errors import NotAnOperator
from quire.cluster.gateway.models import Models
from quire.worker.request.errors import InvalidRequest

_USED = {"requests": 2, "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 8}


def usage_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    async def answer(request: Request) -> Response:
        return await asyncio.to_thread(JSONResponse, await models.usage.answer(_tenant(request)))

    return [
        ApiRoute(
            "/v1/usage",
            answer,
            methods=["GET"],
            access=Access.KEY,
            call=Call(
                "Usage of the API key's tenant, by key.",
                Heading.SERVER,
                query={"tenant": "With an operator's key: one tenant; if absent, all."},
                answer={
                    "object": "list",
                    "since": 1_790_000_000,
                    "data": [
                        {
                            "tenant": "acme",
                            "key": "ci",
                            **_USED,
                            "minutes": [{"start": 1_790_000_040, **_USED}],
                        }
                    ],
                },
            ),
        )
    ]


def _tenant(request: Request) -> str | None:
    """The tenant whose usage is asked for; ``None`` means all. Raises NotAnOperator."""
    unknown = sorted(set(request.query_params) - {"tenant"})
    if unknown:
        raise InvalidRequest(f"{', '.join(unknown)}: unknown; there is tenant")
    asked, caller = request.query_params.get("tenant"), http_caller(request)
    if asked is not None and caller.sees not in (None, asked):
        raise NotAnOperator(
            "the API key is of another tenant: only an operator's sees what others use"
        )
    return caller.sees if asked is None else asked
