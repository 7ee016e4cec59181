"""HTTP routes that declare who may call them, and the application that they make.

The route that a request is handed to checks the caller itself, so that no other reading of the path
can decide differently. A request that fits no route needs a key too: without one, clients learn
nothing about which paths exist.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from quire.cluster.edge.access import Access, check_access
from quire.cluster.edge.call import Call
from quire.cluster.edge.http_errors import ErrorForms


class ApiRoute(Route):
    """A route for the callers that ``access`` allows, whatever the method. ``call`` describes it in
    the reference; the routes of a page have none."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        methods: Collection[str],
        access: Access,
        call: Call | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.access = access
        self.call = call

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_access(self.access, scope["state"]["caller"])
        await super().handle(scope, receive, send)


class _Unknown(BaseRoute):
    """The route of requests that fit no other one: 404, or a redirect to a path that differs by a
    slash at its end."""

    def __init__(self, routes: Sequence[ApiRoute]) -> None:
        self._routes = routes

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # A route that fits but for the method comes first, and answers 405.
        return (Match.PARTIAL if scope["type"] == "http" else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_access(Access.KEY, scope["state"]["caller"])
        path = scope["path"]
        other = {**scope, "path": path.rstrip("/") if path.endswith("/") else f"{path}/"}
        if any(each.matches(other)[0] != Match.NONE for each in self._routes):
            await RedirectResponse(str(URL(scope=other)))(scope, receive, send)
            return
        raise HTTPException(404)


def application(routes: Sequence[ApiRoute], *, errors: ErrorForms | None = None) -> Starlette:
    """The application of ``routes``, for `HttpAuth` to put the caller into the scope. ``errors``:
    how it answers errors. Raises TypeError if a route does not declare who may call it."""
    for route in routes:
        if not isinstance(route, ApiRoute):
            raise TypeError(f"{route} does not declare who may call it: make it an ApiRoute")
    handlers = (errors or ErrorForms()).handlers()
    return Starlette(routes=[*routes, _Unknown(routes)], exception_handlers=handlers)
