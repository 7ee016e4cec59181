"""Authentication at every port of a cluster: callers with wrong credentials or none.

Routes and calls are read from the servers, so that no new one can be forgotten here.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto import vllm_engine_pb2
from starlette.applications import Starlette
from tests.cluster.test_security import Certificates

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.edge.reflection import V1
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact, grpc_connect
from quire.cluster.tls import own_tls
from quire.router.prefix_index.directory import GroupId
from quire.router.registry import Member
from quire.v1 import group_pb2, inference_pb2, inference_pb2_grpc
from quire.worker.request.config import EngineConfig

pytestmark = pytest.mark.anyio

KEY = "secret-a"
WRONG = [
    {},
    *({"authorization": shown} for shown in ("Bearer secret-b", f"Basic {KEY}", KEY, "Bearer")),
]
FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (inference_pb2, group_pb2, health_pb2, reflection_pb2, vllm_engine_pb2)
]
CALLS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
] + [f"/{V1}/ServerReflectionInfo"]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def config(**settings: Any) -> ClusterConfig:
    engine = EngineConfig(model=demo_model.PATH, dtype="float32", num_blocks=64, num_threads=1)
    return ClusterConfig(engine=engine, grpc_port=0, http_port=0, **settings)


@pytest.fixture
def locked(tmp_path: Path, certificates: Certificates) -> ClusterConfig:
    """A gateway with keys and TLS."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    return config(
        api_keys_file=keys,
        tls_certificate=certificates.certificate,
        tls_key=certificates.key,
        group_wait_s=0.2,  # Calls need not wait: there is no group.
    )


@contextlib.asynccontextmanager
async def group(config: ClusterConfig) -> AsyncIterator[GroupServer]:
    server = await GroupServer.start(config, group_id="g")
    try:
        yield server
    finally:
        await server.stop(drain_timeout_s=0)


@contextlib.asynccontextmanager
async def gateway(config: ClusterConfig) -> AsyncIterator[GatewayServer]:
    server = await GatewayServer.start(config)
    try:
        yield server
    finally:
        await server.stop(drain_timeout_s=0)


async def code_of(channel: grpc.aio.Channel, call: str, shown: dict[str, str]) -> grpc.StatusCode:
    """The status of a call with an empty message, which works for calls of any type."""
    make: Any = channel.unary_stream(call)
    stream = make(b"", metadata=tuple(shown.items()), timeout=120)
    try:
        if await stream.read() is not grpc.aio.EOF:
            stream.cancel()
            return grpc.StatusCode.OK
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await stream.code()
    return code


def routes_of(app: Any) -> list[ApiRoute]:
    while not isinstance(app, Starlette):
        app = app._app
    routes = [route for route in app.routes if isinstance(route, ApiRoute)]
    assert len(routes) == len(app.routes) - 1  # The last one is for unknown paths.
    return routes


async def answered(
    client: httpx.AsyncClient,
    routes: list[ApiRoute],
    shown: dict[str, str],
    *,
    refusal: httpx.codes,
) -> set[str]:
    """Paths that do not answer with ``refusal``."""
    found = set()
    for route in routes:
        path = route.path.replace("{model:path}", "m")
        for method in route.methods or ():
            answer = await client.request(method, path, headers=shown)
            if answer.status_code != refusal:
                found.add(path)
    return found


PAGE = {"/ui", "/ui/", "/ui/licenses.txt", "/ui/assets/{name}"}
"""The live page's static files, which are the same everywhere."""


@pytest.mark.slow
async def test_a_gateways_calls_are_for_those_with_a_key_but_health_and_reflection(
    locked: ClusterConfig, certificates: Certificates
) -> None:
    refused = grpc.StatusCode.UNAUTHENTICATED
    async with gateway(locked) as server:
        for shown in WRONG:
            # A new connection each, since unauthenticated callers are cut off after a few calls.
            async with certificates.grpc_channel(server.grpc_address) as channel:
                open_calls = {
                    call for call in CALLS if await code_of(channel, call, shown) != refused
                }
                assert {call.split("/")[1] for call in open_calls} == {
                    "grpc.health.v1.Health",
                    "grpc.reflection.v1.ServerReflection",
                    "grpc.reflection.v1alpha.ServerReflection",
                }
                for unknown in ("/quire.v1.Inference/Nothing", "/nobody/Nothing", "/x"):
                    assert await code_of(channel, unknown, shown) == refused
        known = {"authorization": f"Bearer {KEY}"}
        async with certificates.grpc_channel(server.grpc_address) as channel:
            for call in CALLS:
                assert await code_of(channel, call, known) != refused, call


async def test_a_gateways_routes_are_for_those_with_a_key_but_health_and_pages(
    locked: ClusterConfig, certificates: Certificates
) -> None:
    async with (
        gateway(locked) as server,
        certificates.http_client(server.http_address) as client,
    ):
        routes = routes_of(server._http._server.config.app)
        assert len(routes) > 5
        for shown in WRONG:
            found = await answered(client, routes, shown, refusal=httpx.codes.UNAUTHORIZED)
            assert found == {"/health", "/ping", "/docs", "/openapi.json", *PAGE}


async def test_the_port_for_metrics_has_nothing_else(
    locked: ClusterConfig, certificates: Certificates
) -> None:
    async with (
        gateway(replace(locked, open_metrics=True)) as server,
        certificates.http_client(server.metrics_address) as client,
    ):
        routes = [
            *routes_of(server._metrics._server.config.app),
            *routes_of(server._http._server.config.app),
        ]
        found = await answered(client, routes, {}, refusal=httpx.codes.NOT_FOUND)
        assert found == {"/health", "/ping", "/metrics"}


@pytest.mark.parametrize("with_tls", [True, False], ids=["tls", "plain"])
async def test_a_group_answers_nobody_without_its_token(
    locked: ClusterConfig, with_tls: bool
) -> None:
    """Also not callers with a client's key, and also if keys and TLS are off."""
    async with group(locked if with_tls else config()) as server:
        contact = server.contact
        assert bool(contact.certificate) == with_tls
        other = GroupContact(
            address=contact.address, token=contact.token[::-1], certificate=contact.certificate
        )
        async with channel_to(contact) as channel:
            for shown in (*WRONG, {"authorization": f"Bearer {KEY}"}, bearer(other)):
                for call in (*CALLS, "/quire.v1.ReplicaGroup/Nothing", "/x"):
                    code = await code_of(channel, call, shown)
                    assert code == grpc.StatusCode.UNAUTHENTICATED, call
            describe = "/quire.v1.ReplicaGroup/Describe"
            assert await code_of(channel, describe, bearer(contact)) == grpc.StatusCode.OK


async def test_a_group_behind_tls_is_reached_by_its_own_certificate_alone(
    locked: ClusterConfig,
) -> None:
    question = group_pb2.DescribeRequest()
    async with group(locked) as server:
        contact = server.contact
        another = own_tls().certificate
        for certificate in ("", another):
            wrong = GroupContact(
                address=contact.address, token=contact.token, certificate=certificate
            )
            connection = grpc_connect(contact.address, contacts={contact.address: wrong})
            async with connection as link:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await link.Describe(question, timeout=120)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        async with grpc_connect(contact.address, contacts={contact.address: contact}) as link:
            assert (await link.Describe(question, timeout=120)).group_id == "g"


@pytest.mark.parametrize("with_tls", [True, False], ids=["tls", "plain"])
async def test_a_gateway_that_was_told_of_a_group_serves_over_it(
    locked: ClusterConfig, certificates: Certificates, with_tls: bool
) -> None:
    """Also where only one of gateway and group has TLS, as while an upgrade turns it on."""
    async with group(locked if with_tls else config()) as there:
        for settings in (locked, config()):
            async with gateway(settings) as server:
                server.set_groups([GroupContact.of(there.contact.metadata()) or there.contact])
                groups = server.models.named(None).groups
                while not groups.num_ready:
                    await groups.wait_for_change(timeout_s=1)
                if settings is locked:
                    channel = certificates.grpc_channel(server.grpc_address)
                else:
                    channel = grpc.aio.insecure_channel(server.grpc_address)
                async with channel:
                    stub = inference_pb2_grpc.InferenceStub(channel)
                    request = inference_pb2.GenerateRequest(text="A whale is")
                    request.sampling.max_tokens = 3
                    shown = (("authorization", f"Bearer {KEY}"),)
                    chunks = [chunk async for chunk in stub.Generate(request, metadata=shown)]
                assert chunks[-1].usage.num_output_tokens == 3


def test_a_token_is_not_for_logs() -> None:
    contact = GroupContact(address="host:1", token="the token", certificate="the certificate")
    assert "the token" not in repr(contact)
    assert "the token" not in repr(Member(GroupId("g"), contact.metadata()))
    assert GroupContact.of(contact.metadata()) == contact
    assert GroupContact.of({"token": "x"}) is None


def bearer(contact: GroupContact) -> dict[str, str]:
    return {"authorization": f"Bearer {contact.token}"}


def channel_to(contact: GroupContact) -> grpc.aio.Channel:
    if not contact.certificate:
        return grpc.aio.insecure_channel(contact.address)
    return grpc.aio.secure_channel(
        contact.address,
        grpc.ssl_channel_credentials(contact.certificate.encode()),
        options=[("grpc.ssl_target_name_override", "group.quire")],
    )
