"""A gateway's start that fails, and what its stop leaves behind: nothing."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio


def config_of(**settings: Any) -> ClusterConfig:
    ports = {"grpc_port": 0, "http_port": 0}
    return ClusterConfig(engine=EngineConfig(model=demo_model.PATH), **(ports | settings))


def other_tasks() -> set[asyncio.Task[Any]]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("name", ["grpc_port", "http_port"])
async def test_a_start_without_its_port_leaves_no_task_behind(name: str) -> None:
    before = other_tasks()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{name}={port}: 127.0.0.1 cannot listen"):
            await GatewayServer.start(config_of(**{name: port}))
    assert other_tasks() == before


async def test_a_start_with_an_unusable_keys_file_leaves_no_task_behind(tmp_path: Path) -> None:
    before = other_tasks()
    with pytest.raises(ConfigError):
        await GatewayServer.start(config_of(api_keys_file=tmp_path / "missing"))
    assert other_tasks() == before


async def test_a_stop_ends_every_task(tmp_path: Path) -> None:
    before = other_tasks()
    pair = trustme.CA().issue_cert("localhost")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    pair.private_key_pem.write_to_path(str(key))
    pair.cert_chain_pems[0].write_to_path(str(certificate))
    server = await GatewayServer.start(config_of(tls_certificate=certificate, tls_key=key))
    await server.stop(drain_timeout_s=0)
    assert other_tasks() == before
