"""The OpenAI-compatible HTTP API over a gateway's `Models`: an ASGI application.

Errors are OpenAI's: a status code and ``{"error": {message, type, param, code}}``.
"""

from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from quire.cluster.edge.access import Access
from quire.cluster.edge.auth import ApiKeys, HttpAuth
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import Call, Heading
from quire.cluster.edge.call_records import HttpCalls
from quire.cluster.edge.generation_api import CHAT, COMPLETIONS, generation_routes
from quire.cluster.edge.http_errors import ErrorForms
from quire.cluster.edge.models_api import model_routes
from quire.cluster.edge.routes import ApiRoute, application
from quire.cluster.edge.streams import RequestIds
from quire.cluster.edge.text_api import text_routes
from quire.cluster.gateway.models import Models
from quire.cluster.seams import Feature, TextCall


def build_http_app(
    models: Models,
    *,
    features: Sequence[Feature],
    keys: ApiKeys | None = None,
    allow_origins: Sequence[str] = (),
    ignore_unknown_fields: bool = False,
) -> ASGIApp:
    """The application. Any ASGI server can serve it in the gateway's event loop.

    ``features``: what adds further calls. ``keys``: the API keys; without them, every client is let
    in. ``allow_origins``: the origins whose pages may call from browsers (CORS); "*" is all.
    ``ignore_unknown_fields``: whether unknown fields of bodies are ignored; otherwise such a
    request is refused.
    """
    bodies = BodyReader(
        models.bodies,
        turns=models.turns,
        ignore_unknown_fields=ignore_unknown_fields,
        refused=models.telemetry.refused.labels("bodies").inc,
    )
    routes = api_routes(models, bodies, features)
    about = [
        route
        for each in features
        if each.routes_about is not None
        for route in each.routes_about(routes)
    ]
    errors = ErrorForms(
        below={path: form for each in features for path, form in each.error_forms.items()},
        prompt_fields={call.path: call.prompt_field for call in _text_calls(features)},
    )
    app: ASGIApp = HttpAuth(
        application([*routes, *about], errors=errors), keys=keys, headers=models.tenants.headers
    )
    if allow_origins:  # Around the keys: a CORS preflight request shows no key.
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
                *(header for each in features for header in each.response_headers),
            ],
        )
    # Outermost, so that internal errors carry the request id too.
    paths = [route.path for route in routes if route.call is not None]
    return HttpCalls(RequestIds(app), begin=models.began, finish=models.finished, paths=paths)


def api_routes(models: Models, bodies: BodyReader, features: Sequence[Feature]) -> list[ApiRoute]:
    """All routes but those about them, in the order in which the reference has their calls below a
    heading."""
    return [
        *model_routes(models),
        *generation_routes(models, bodies, _text_calls(features)),
        *(
            route
            for each in features
            if each.routes is not None
            for route in each.routes(models, bodies)
        ),
        *text_routes(models, bodies),
        *_own_routes(models),
    ]


def _text_calls(features: Sequence[Feature]) -> list[TextCall]:
    return [CHAT, COMPLETIONS, *(call for each in features for call in each.text_calls)]


def build_metrics_app(models: Models, *, keys: ApiKeys | None) -> ASGIApp:
    """The part of `build_http_app` that reports on the gateway itself. With ``keys``, metrics need
    an operator's key."""
    return HttpAuth(application(_own_routes(models)), keys=keys)


_HEALTH = {"status": "ready", "ready_groups": 1}


def _own_routes(models: Models) -> list[ApiRoute]:
    """Health checks and metrics. ``/ping`` is the name of ``/health`` that some load balancers
    use."""

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
        ApiRoute(
            "/health",
            health,
            methods=["GET"],
            access=Access.OPEN,
            call=Call(
                "200 while a group can serve, else 503. Needs no key.",
                Heading.SERVER,
                answer=_HEALTH,
            ),
        ),
        ApiRoute(
            "/ping",
            health,
            methods=["GET"],
            access=Access.OPEN,
            call=Call("The same as /health.", Heading.SERVER, answer=_HEALTH),
        ),
        ApiRoute(
            "/metrics",
            metrics,
            methods=["GET"],
            access=Access.OPERATOR,
            call=Call(
                "Prometheus metrics. With API keys, needs an operator's key.",
                Heading.SERVER,
                media="text/plain",
            ),
        ),
    ]
