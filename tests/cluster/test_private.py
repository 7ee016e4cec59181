"""Versions of Ray and uvicorn without the private APIs that Quire uses cause a clear error."""

import logging
import tomllib
from pathlib import Path

import pytest
import ray
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from ray._private import node, ray_constants, services, worker
from ray.serve._private import replica
from uvicorn.protocols.http import httptools_impl

from quire.cluster.deploy import ray_private
from quire.cluster.deploy.serve_port import keep_to_node_address
from quire.cluster.deploy.signals import ray_leaves_signals_alone
from quire.cluster.features.guard import uvicorn_private
from quire.worker.request.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def unwarned() -> None:
    ray_private._warn.cache_clear()
    uvicorn_private.check_uvicorn.cache_clear()


def test_the_installed_versions_have_every_part(caplog: pytest.LogCaptureFixture) -> None:
    ray_private.check_ray()
    uvicorn_private.check_uvicorn()
    assert [str(part) for part in ray_private.ALL if part.owner() is None] == []
    assert not caplog.records


def test_a_ray_without_a_needed_part_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    monkeypatch.delattr(node.Node, "kill_all_processes")
    with pytest.raises(ConfigError) as refused:
        ray_private.check_ray()
    assert str(refused.value) == (
        f"ray {ray.__version__} has no `ray._private.ray_constants.ENABLE_RAY_CLUSTER`, "
        "`ray._private.node.Node.kill_all_processes`, which Quire needs; Quire was tested with "
        "2.60.0: pip install 'ray[serve]>=2.60,<2.61'"
    )


def test_a_ray_without_a_whole_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ray._private.nothing", "ray._nothing.node"):
        part = ray_private.Part(module, "Node")
        assert part.owner() is None
        with pytest.raises(ConfigError, match=rf"has no `{module}.Node`"):
            part.get()


def test_a_module_s_own_broken_import_is_not_taken_for_a_missing_part() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        ray_private.Part("tests.cluster.broken_import", "anything").owner()


def test_without_a_comfort_ray_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(services, "ConsolePopen")
    connect = worker.connect
    with caplog.at_level(logging.WARNING), ray_leaves_signals_alone(), ray_leaves_signals_alone():
        assert worker.connect is not connect
        assert not hasattr(services, "ConsolePopen")
    assert worker.connect is connect
    (record,) = caplog.records
    assert "has no `ray._private.services.ConsolePopen`: a signal" in record.getMessage()


def test_a_serve_that_opens_ports_in_another_way_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(replica, "add_port_to_grpc_server")
    keep_to_node_address()
    assert "close all ports but the gateways' to others" in caplog.text


@pytest.mark.parametrize(
    ("owner", "name", "shown"),
    [
        (httptools_impl, "STATUS_LINE", "STATUS_LINE"),
        (httptools_impl, "RequestResponseCycle", "RequestResponseCycle"),
        (uvicorn.Server, "capture_signals", "Server.capture_signals"),
        (
            httptools_impl.HttpToolsProtocol,
            "timeout_keep_alive_handler",
            "HttpToolsProtocol.timeout_keep_alive_handler",
        ),
    ],
)
def test_a_uvicorn_without_a_part_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, shown: str
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=rf"uvicorn {uvicorn.__version__} has no `{shown}`"):
        uvicorn_private.check_uvicorn()


def test_attributes_that_a_constructor_sets_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Protocol(httptools_impl.HttpToolsProtocol):
        def __init__(self) -> None:
            pass

    monkeypatch.setattr(httptools_impl, "HttpToolsProtocol", Protocol)
    with pytest.raises(ConfigError, match=r"`HttpToolsProtocol\.config`"):
        uvicorn_private.check_uvicorn()


@pytest.mark.parametrize("package", ["ray", "uvicorn"])
def test_what_is_called_tested_is_what_the_project_allows_and_locks(package: str) -> None:
    private = {"ray": ray_private, "uvicorn": uvicorn_private}[package]
    lowest, highest = private.TESTED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, project["optional-dependencies"]["cluster"])
    (bounds,) = (each.specifier for each in wanted if each.name == package)
    assert f">={Version(lowest).major}.{Version(lowest).minor}" in str(bounds)
    assert f"\n{package}=={highest} " in (ROOT / "requirements.lock").read_text()
    install = Requirement(private._INSTALL).specifier
    assert {lowest, highest} <= set(install.filter([lowest, highest]))
