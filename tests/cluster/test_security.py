"""A gateway with TLS and API keys and without groups: authorised callers get that error."""

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import demo_model
from quire.cluster.cli.main import main
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.edge.auth import ApiKeys
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio

REQUEST = pb.TokenizeRequest(text="hello")


@contextlib.asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[GatewayServer]:
    config = ClusterConfig(
        engine=EngineConfig(model=demo_model.PATH),
        grpc_port=0,
        http_port=0,
        **{"group_wait_s": 0.1, **settings},
    )
    server = await GatewayServer.start(config)
    try:
        yield server
    finally:
        await server.stop(drain_timeout_s=0)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# team a\nsecret-a\n\nsecret-b\n")
    return path


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_calls_without_a_known_key_are_refused(keys_file: Path) -> None:
    async with (
        gateway(api_keys_file=keys_file) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        refused = grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(stub.Tokenize(REQUEST)) == refused
        assert await code_of(stub.Generate(pb.GenerateRequest(text="x")).read()) == refused
        assert await code_of(stub.ExplainRouting(pb.ExplainRoutingRequest())) == refused
        for wrong in ("secret-a", "Bearer secret-c", "Bearer ", "Basic secret-a", "Bearer secret"):
            assert await code_of(stub.Tokenize(REQUEST, metadata=[("authorization", wrong)])) == (
                refused
            )
        known = [("authorization", "Bearer secret-b")]
        no_groups = grpc.StatusCode.UNAVAILABLE
        assert await code_of(stub.Tokenize(REQUEST, metadata=known)) == no_groups
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_every_path_but_health_wants_a_key(keys_file: Path) -> None:
    async with (
        gateway(api_keys_file=keys_file) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=None) as client,
    ):
        for path in (
            "/v1/models",
            "/v1/routing/decisions",
            "/v1/nothing",
            "/tokenize",
            "/",
            "/healthz",
            "/metrics",
            "//health",
        ):
            answer = await client.get(path, headers={"X-Request-Id": "mine"})
            assert answer.status_code == 401, path
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["X-Request-Id"] == "mine"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/health")).status_code == 503
        known = {"Authorization": "Bearer secret-a"}
        assert (await client.get("/v1/models", headers=known)).status_code == 200


@pytest.mark.parametrize("is_open", [False, True])
async def test_metrics_are_for_operators_unless_their_own_port_is_opened(
    tmp_path: Path, is_open: bool
) -> None:
    path = tmp_path / "keys"
    path.write_text("tenants-key acme\noperators-key *\n")
    shown: dict[int, dict[str, str]] = {
        401: {},
        403: {"Authorization": "Bearer tenants-key"},
        200: {"Authorization": "Bearer operators-key"},
    }
    async with (
        gateway(api_keys_file=path, open_metrics=is_open) as server,
        httpx.AsyncClient(timeout=None) as client,
    ):
        for status, headers in shown.items():
            url = f"http://{server.http_address}/metrics"
            assert (await client.get(url, headers=headers)).status_code == status
            url = f"http://{server.metrics_address}/metrics"
            answer = await client.get(url, headers=headers)
            assert answer.status_code == (200 if is_open else status)
            url = f"http://{server.metrics_address}/health"
            assert (await client.get(url, headers=headers)).status_code == 503


@pytest.mark.parametrize("text", ["", "# only a comment\n\n"])
async def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="has no key: write one a line"):
        ApiKeys.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(tmp_path / "absent")


class Certificates:
    """A certificate authority, and the files that a server reads."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        self.issue()

    def issue(self) -> None:
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        for path, blobs in (
            (self.certificate, issued.cert_chain_pems),
            (self.key, [issued.private_key_pem]),
        ):
            path.write_bytes(b"".join(blob.bytes() for blob in blobs))

    def grpc_channel(self, address: str) -> grpc.aio.Channel:
        root = self.authority.cert_pem.bytes()
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root), options)

    def http_client(self, address: str) -> httpx.AsyncClient:
        context = ssl.create_default_context(cadata=self.authority.cert_pem.bytes().decode())
        return httpx.AsyncClient(base_url=f"https://{address}", verify=context, timeout=None)


async def check_both(certificates: Certificates, server: GatewayServer) -> None:
    async with certificates.grpc_channel(server.grpc_address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=120
        )
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    async with certificates.http_client(server.http_address) as client:
        assert (await client.get("/health")).status_code == 503


async def test_tls_serves_both_protocols_and_takes_up_a_new_certificate(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with gateway(
        tls_certificate=certificates.certificate, tls_key=certificates.key
    ) as server:
        await check_both(certificates, server)

        certificates.key.write_text("half written")
        assert server.tls is not None
        server.tls.refresh()
        await check_both(certificates, server)

        certificates.authority = trustme.CA()
        certificates.issue()
        server.tls.refresh()
        await check_both(certificates, server)

        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            call = stub.Check(health_pb2.HealthCheckRequest(), timeout=120)
            assert await code_of(call) == grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_that_does_not_fit_its_key_is_refused(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"tls\.crt.* cannot be used"):
        async with gateway(
            tls_certificate=certificates.certificate, tls_key=Certificates(other).key
        ):
            pass
    with pytest.raises(ConfigError, match="tls_key is not: set both or neither"):
        ClusterConfig(
            engine=EngineConfig(model=demo_model.PATH), tls_certificate=certificates.certificate
        )


async def test_the_command_line_says_what_a_stranger_lacks(
    tmp_path: Path, keys_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificates = Certificates(tmp_path)
    known, unknown = tmp_path / "known.pem", tmp_path / "unknown.pem"
    certificates.authority.cert_pem.write_to_path(str(known))
    trustme.CA().cert_pem.write_to_path(str(unknown))
    async with gateway(
        tls_certificate=certificates.certificate,
        tls_key=certificates.key,
        api_keys_file=keys_file,
    ) as server:
        for authority, status, remedy in (
            (known, 1, "UNAUTHENTICATED: .*; here, set QUIRE_API_KEY to one of the server's keys"),
            (unknown, 1, "--tls-ca names the authority that signed the server's certificate"),
            (keys_file, 2, "tls_ca='.*keys' cannot be used: .*; it must be .* as PEM"),
            (tmp_path / "absent", 2, "absent' cannot be used: .*No such file"),
        ):
            command = ["explain", "--address", server.grpc_address, "--tls-ca", str(authority)]
            assert await asyncio.to_thread(main, command) == status
            assert re.search(remedy, capsys.readouterr().err)
