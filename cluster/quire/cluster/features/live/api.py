"""``GET /ui``: a live page of a gateway's activity; and ``GET /ui/events``, its data.

The page's files need no key: they are the same everywhere and contain no data. The events cover all
tenants and need an operator's key. File names derive from file contents, so that browsers can cache
them. The page loads nothing from any other server.
"""

from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from quire.cluster.edge.access import Access, check_access
from quire.cluster.edge.auth import operates_http
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.streams import EventStream
from quire.cluster.features.live.live import MAX_EVERY_S
from quire.cluster.gateway.models import Models
from quire.worker.request.errors import InvalidRequest

_FOLDER = files("quire.cluster.features.live").joinpath("ui")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_SAFETY: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; object-src 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def ui_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    """The routes of the page, its files and its events, and of ``/``, which redirects browsers to
    it."""

    live = models.live

    async def page(request: Request) -> Response:
        return _answer(pages["index.html"], "index.html", cache="no-cache")

    async def licences(request: Request) -> Response:
        return _answer(pages["licenses.txt"], "licenses.txt", cache="no-cache")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in assets:
            raise HTTPException(404)
        return _answer(assets[name], name, cache="public, max-age=31536000, immutable")

    async def events(request: Request) -> Response:
        every = _every(request.query_params)
        live.check_room()
        return EventStream(partial(live.watch, every=every, may_watch=operates_http(request)))

    async def root(request: Request) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            check_access(Access.KEY, request.state.caller)
            raise HTTPException(404)
        return RedirectResponse("ui")

    async def slash(request: Request) -> Response:
        return RedirectResponse("../ui")

    pages, assets = _read(_FOLDER), _read(_FOLDER.joinpath("assets"))
    return [
        ApiRoute("/", root, methods=["GET"], access=Access.OPEN),
        ApiRoute("/ui", page, methods=["GET"], access=Access.OPEN),
        ApiRoute("/ui/", slash, methods=["GET"], access=Access.OPEN),
        ApiRoute("/ui/licenses.txt", licences, methods=["GET"], access=Access.OPEN),
        ApiRoute("/ui/assets/{name}", asset, methods=["GET"], access=Access.OPEN),
        ApiRoute("/ui/events", events, methods=["GET"], access=Access.OPERATOR),
    ]


def _read(folder: Traversable) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}


def _answer(content: bytes, name: str, *, cache: str) -> Response:
    headers = {**_SAFETY, "Cache-Control": cache, "Content-Type": _TYPES[PurePath(name).suffix]}
    return Response(content, headers=headers)


def _every(query: QueryParams) -> int:
    """How many ticks of a second lie between two events that a viewer receives."""
    if unknown := sorted(set(query) - {"every"}):
        raise InvalidRequest(f"{', '.join(unknown)}: unknown; there is every")
    given = query.get("every", "1")
    if given.isascii() and given.isdigit() and len(given) < 3 and 1 <= int(given) <= MAX_EVERY_S:
        return int(given)
    raise InvalidRequest(f"every={given[:20]!r} is out of range: 1 to {MAX_EVERY_S}", param="every")
