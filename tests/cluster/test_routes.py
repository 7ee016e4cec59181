"""Who reaches which route and which gRPC method, however the call is spelled.

The right answers are written here by hand. A new route or method that is not named here must need a
key, and one that declares nothing must not start.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tests.cluster.test_every_door import config as config_of
from tests.cluster.test_every_door import gateway, routes_of

from quire.cluster.edge.access import EVERYONE, Access, Caller, allows, rpc_access
from quire.cluster.edge.admin_grpc import AdminService
from quire.cluster.edge.auth import ApiKeys, GrpcAuth, HttpAuth, operates_grpc, operates_http
from quire.cluster.edge.grpc_server import InferenceService
from quire.cluster.edge.routes import ApiRoute, application
from quire.cluster.features.guard.listener import HttpListener
from quire.cluster.features.vllm_grpc.servicer import VLLM_SERVICE, VllmEngineService
from quire.cluster.gateway.models import Models
from quire.v1 import admin_pb2, inference_pb2

pytestmark = pytest.mark.anyio

ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
OPEN = {
    *("/health", "/ping", "/docs", "/openapi.json"),
    *("/", "/ui", "/ui/", "/ui/licenses.txt", "/ui/assets/{name}"),
}
OPERATORS = {
    *("/metrics", "/load", "/ui/events"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}
KEYS = {
    "nobody's": "",
    "unknown": "Authorization: Bearer secret-c\r\n",
    "tenant's": "Authorization: Bearer secret-a\r\n",
    "operator's": "X-API-Key: secret-b\r\n",
}
SPELLINGS: list[Callable[[str], str]] = [
    lambda path: path,
    lambda path: f"{path}%0a",
    lambda path: f"{path}%0A?x=1",
    lambda path: f"{path}%0d%0a",
    lambda path: f"%0a{path}",
    lambda path: f"{path}%00",
    lambda path: f"{path}%E2%80%A8",
    lambda path: f"{path}%20",
    lambda path: f"{path}/",
    lambda path: f"/{path}",
    lambda path: f"{path}//",
    lambda path: path.replace("/", "//"),
    lambda path: path.upper(),
    lambda path: path[0] + "".join(f"%{ord(each):02x}" for each in path[1:]),
    lambda path: quote(path, safe="").replace("%2F", "/", 1),
    lambda path: path.replace("/", "%2f"),
    lambda path: path.replace("/", "%252f"),
    lambda path: f"/.{path}",
    lambda path: f"/health/..{path}",
    lambda path: f"/docs/%2e%2e{path}",
    lambda path: f"{path}/.",
    lambda path: f"{path};x=1",
    lambda path: f"{path}?x=/health",
    lambda path: f"{path}%3fx",
    lambda path: f"{path}#/health",
    lambda path: f"http://gateway{path}",
    lambda path: f"http://gateway{path}%0a",
    lambda path: f"http://health@gateway{path}",
]
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PROPFIND", "SUBSCRIBE")


class Reached:
    """Notes which routes of a listener's application are reached, instead of running them."""

    def __init__(self, listener: HttpListener) -> None:
        self.by: dict[str, set[str]] = defaultdict(set)
        self.routes = routes_of(listener._server.config.app)
        for route in self.routes:
            route.app = self._noting(route.path)

    def _noting(self, path: str) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            shown = dict(scope["headers"])
            self.by[shown[b"x-kind"].decode()].add(path)
            await Response()(scope, receive, send)

        return app


class Client:
    """Sends requests as they are written, over one connection while the server keeps it."""

    def __init__(self, address: str, kind: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._head = f"Host: gateway\r\nX-Kind: {kind}\r\n{KEYS[kind]}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, target: str) -> int:
        """The status of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._streams
        writer.write(f"{method} {target} HTTP/1.1\r\n{self._head}".encode("latin-1"))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        if method != "HEAD":
            await reader.readexactly(length)
        if "connection: close" in head:
            self.close()
        return int(head.split()[1])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@pytest.mark.parametrize(
    "spellings",
    [SPELLINGS[:3], pytest.param(SPELLINGS, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
async def test_no_spelling_of_a_path_gives_a_key_more_rights(
    tmp_path: Path, spellings: list[Callable[[str], str]]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-a team-a\nsecret-b *\n")
    async with gateway(config_of(api_keys_file=keys)) as server:
        for listener, address in (
            (server._http, server.http_address),
            (server._metrics, server.metrics_address),
        ):
            reached = Reached(listener)
            paths = {route.path for route in reached.routes}
            asked = [
                (method, spelled(route.path.replace("{model:path}", "m").replace("{name}", "n")))
                for route in reached.routes
                for spelled in spellings
                for method in (METHODS if spelled is SPELLINGS[0] else route.methods or ())
            ]
            for kind in KEYS:
                client = Client(address, kind)
                for method, target in asked:
                    status = await client.ask(method, target)
                    assert status in (200, 307, 400, 401, 403, 404, 405), (method, target)
                client.close()
            assert reached.by["nobody's"] == reached.by["unknown"] == OPEN & paths
            assert reached.by["tenant's"] == paths - OPERATORS
            assert reached.by["operator's"] == paths


async def test_a_stranger_learns_nothing_of_which_paths_exist(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-a team-a\n")
    async with gateway(config_of(api_keys_file=keys)) as server:
        stranger, tenant = (Client(server.http_address, each) for each in ("nobody's", "tenant's"))
        for path in ("/metrics", "/metrics/", "/nothing", "/v1/models", "/v1/models//"):
            for method in METHODS:
                assert await stranger.ask(method, path) == 401
        assert await stranger.ask("GET", "/metrics%0a") == 400
        for path, status in {"/metrics%0a": 400, "/metrics/": 307, "/nothing": 404}.items():
            assert await tenant.ask("GET", path) == status
        assert await tenant.ask("PUT", "/v1/models") == 405
        assert await tenant.ask("PUT", "/metrics") == 403
        stranger.close()
        tenant.close()


def test_a_route_that_declares_nothing_does_not_start() -> None:
    async def endpoint(request: object) -> Response:
        return Response()

    undeclared: Any = Route("/x", endpoint)
    with pytest.raises(TypeError, match="does not declare"):
        application([undeclared])
    make: Any = ApiRoute
    with pytest.raises(TypeError, match="access"):
        make("/x", endpoint, methods=["GET"])


async def test_a_route_without_a_known_caller_fails() -> None:
    """So an application that is served without `HttpAuth` answers nobody."""

    async def endpoint(request: object) -> Response:
        return Response()

    app: Starlette = application([ApiRoute("/x", endpoint, methods=["GET"], access=Access.OPEN)])
    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "query_string": b""}
    with pytest.raises(KeyError):
        await app.router.routes[0].handle(scope, None, None)  # type: ignore[arg-type]


def test_a_grpc_method_that_declares_nothing_does_not_start() -> None:
    class Servicer:
        @allows(Access.OPERATOR)
        def ListGroups(self) -> None: ...

    with pytest.raises(TypeError, match="does not declare who may call it"):
        rpc_access(ADMIN, Servicer())


@pytest.mark.parametrize("kind", KEYS)
async def test_a_grpc_method_that_no_service_declares_is_an_operators(kind: str) -> None:
    keys = ApiKeys({"secret-a": Caller(tenant="team-a"), "secret-b": EVERYONE})
    shown = {name.lower(): value for name, _, value in [KEYS[kind].strip().partition(": ")]}
    details = SimpleNamespace(method="/new.Service/Call", invocation_metadata=shown)
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: request)

    async def find(details: object) -> object:
        return handler

    given: Any = details
    found = await GrpcAuth(keys).intercept_service(find, given)
    assert (found is handler) == (kind == "operator's")


async def test_what_each_grpc_method_is_for() -> None:
    models = Models()
    try:
        vllm = rpc_access(VLLM_SERVICE, VllmEngineService(models))
        inference = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
        for_tenants = rpc_access(inference, InferenceService(models))
        admin = rpc_access(ADMIN, AdminService(models))
    finally:
        await models.close()
    assert {*for_tenants.values()} == {Access.KEY}
    assert {*admin.values()} == {Access.OPERATOR}
    operators = {call.rpartition("/")[2] for call in vllm if vllm[call] is not Access.KEY}
    assert operators == {"GetLoads", "SubscribeKvEvents"}


async def test_what_runs_without_an_end_learns_that_its_key_was_withdrawn(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("secret-a *\nsecret-b *\n")
    keys, given = ApiKeys.load(file), list[Request]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        given.append(Request(scope))

    headers = [(b"authorization", b"Bearer secret-a")]
    none: Any = None
    await HttpAuth(app, keys=keys)({"type": "http", "path": "/", "headers": headers}, none, none)
    details: Any = SimpleNamespace(method="/S/C", invocation_metadata=(("x-api-key", "secret-a"),))

    async def find(details: object) -> object:
        return None

    await GrpcAuth(keys).intercept_service(find, details)
    over_http, over_grpc = operates_http(given[0]), operates_grpc()
    assert over_http()
    assert over_grpc()
    file.write_text("secret-b *\n")
    await keys.look()
    assert not over_http()
    assert not over_grpc()
