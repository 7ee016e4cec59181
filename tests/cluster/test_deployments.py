"""The deployment classes without Serve: their inputs from it, and their end."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy import deployments
from quire.cluster.deploy.build import build_gateways
from quire.cluster.deploy.deployments import Gateway, ReplicaGroup, pool_of
from quire.cluster.deploy.listed import Listed, listed_in, to_json
from quire.cluster.deploy.model_set import Follow
from quire.cluster.features.autoscale import report_demand
from quire.cluster.features.autoscale.demand import Demand
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact
from quire.router.prefix_index.directory import GroupId
from quire.router.registry import REGISTRY, Member
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio

CONFIG = ClusterConfig(engine=EngineConfig(model=demo_model.PATH), served_model_name="demo")
POOL = pool_of("demo")
FIRST = Member(GroupId("g0"), {"address": "host:1"})
SECOND = Member(GroupId("g1"), {"address": "host:2"})


def test_a_gateway_whose_answer_is_late_by_a_minute_is_not_replaced() -> None:
    """A starved one could not be for minutes; a watcher ends one that hangs."""
    app = build_gateways(CONFIG, listed_in(CONFIG))
    assert app._bound_deployment._deployment_config.health_check_timeout_s >= 60


class FakeServer:
    """A stand-in for a gateway's server and its only model, which records group addresses."""

    def __init__(self) -> None:
        self.groups = self
        self.models = self
        self.service = self
        self.by_name = {"demo": self}
        self.explanations = SimpleNamespace()
        self.adapters = SimpleNamespace()
        self.usage = SimpleNamespace()
        self.table = object()
        self.demand = Demand()
        self.addresses: list[str] = []
        self.hash_prompt = None

    def listeners(self) -> Iterator[socket.socket]:
        return iter(())

    async def listen(self) -> None:
        pass

    def set_groups(self, contacts: Iterable[GroupContact]) -> None:
        self.addresses = [contact.address for contact in contacts]

    async def stop(self, *, drain_timeout_s: float) -> None:
        REGISTRY.publish(POOL, [FIRST, SECOND])  # Started while this gateway's last streams end.
        await asyncio.sleep(0)


class FakeSet:
    """A model set that answers with the server for each model."""

    def __init__(self, *_: Any, follow: Follow, **__: Any) -> None:
        self._follow = follow
        self._stops: list[Callable[[], None]] = []

    async def set(self, listed: Sequence[Listed]) -> None:
        self._stops = [self._follow(each, FAKE_SERVERS[-1]) for each in listed]  # type: ignore[arg-type]

    def check(self) -> None:
        pass

    async def close(self) -> None:
        for stop in self._stops:
            stop()


FAKE_SERVERS: list[FakeServer] = []


class FakeCall:
    """A handle's call that Serve cannot assign to a group and that is never answered."""

    def __init__(self) -> None:
        self._assigned: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, None]:
        return self._assigned.__await__()

    def cancel(self) -> None:
        error = RuntimeError("replica_groups cannot be deployed")
        self._assigned.set_exception(error)
        raise error


class FakeHandle:
    """A handle to groups, whose calls or cancellations raise."""

    def __init__(self, *, raises: bool = False) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()
        self._raises = raises

    def options(self, **_: Any) -> "FakeHandle":
        return self

    def remote(self, name: str, num_tokens: int) -> FakeCall:
        self.told.put_nowait(num_tokens)
        if self._raises:
            raise RuntimeError("no router")
        return FakeCall()


@pytest.fixture(autouse=True)
def loggers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves loggers unchanged, as other tests of this process expect."""
    monkeypatch.setattr(deployments, "log_beside_serve", lambda config: None)


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeServer]:
    server = FakeServer()
    FAKE_SERVERS[:] = [server]

    async def be_watched(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(deployments, "GatewayServer", lambda config: server)
    monkeypatch.setattr(deployments, "ModelSet", FakeSet)
    monkeypatch.setattr(deployments, "keep_to_node_address", lambda: None)
    monkeypatch.setattr(deployments, "claim_ports", lambda *_, **__: contextlib.ExitStack())
    monkeypatch.setattr(deployments, "be_watched", be_watched)
    monkeypatch.setattr(report_demand, "_DEMAND_REPORT_S", 0)
    this = SimpleNamespace(unique_id="this")
    context = SimpleNamespace(app_name="app", deployment="Gateway", replica_id=this)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    yield server
    REGISTRY.publish(POOL, [])
    gc.unfreeze()
    gc.collect()


async def make_gateway(
    monkeypatch: pytest.MonkeyPatch, handle: FakeHandle | None = None, **changes: Any
) -> Any:
    monkeypatch.setattr(deployments, "_handle", lambda *_: handle or FakeHandle())
    gateway: Any = Gateway.__new__(Gateway)
    await gateway.__init__(CONFIG)
    await gateway.reconfigure(to_json(listed_in(replace(CONFIG, **changes))))
    await asyncio.sleep(0)
    return gateway


@pytest.mark.parametrize("raises", [True, False], ids=["call", "cancel"])
async def test_demand_is_told_again_after_it_could_not_be(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    handle = FakeHandle(raises=raises)
    gateway = await make_gateway(monkeypatch, handle, autoscaling=AutoscalingSettings(min_groups=0))
    for num_tokens in (3, 5):
        with server.demand.waiting(num_tokens):
            assert await asyncio.wait_for(handle.told.get(), 120) == num_tokens
        for _ in range(5):
            await asyncio.sleep(0)  # Until the gateway has seen that no request waits.
        while not handle.told.empty():
            handle.told.get_nowait()
    await gateway.__del__()


async def test_a_gateway_that_was_cut_off_from_new_connections_is_replaced(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cut_off = asyncio.Event()

    async def be_watched(*_: Any, **__: Any) -> None:
        await is_cut_off.wait()

    monkeypatch.setattr(deployments, "be_watched", be_watched)
    gateway = await make_gateway(monkeypatch)
    gateway.check_health()
    is_cut_off.set()
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="gets no new connections"):
        gateway.check_health()
    await gateway.__del__()


async def test_a_gateway_hears_of_new_groups_until_its_last_stream_has_ended(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    REGISTRY.publish(POOL, [FIRST])
    gateway = await make_gateway(monkeypatch)
    assert server.addresses == ["host:1"]
    await gateway.__del__()
    assert server.addresses == ["host:1", "host:2"]
    REGISTRY.publish(POOL, [FIRST])
    await asyncio.sleep(0)
    assert server.addresses == ["host:1", "host:2"]
    assert REGISTRY.routing(POOL) is None


@pytest.mark.slow
async def test_the_collector_is_spared_what_a_started_process_has_loaded(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.unfreeze()
    gateway = await make_gateway(monkeypatch)
    assert gc.get_freeze_count() > 10 * len(gc.get_objects())
    await gateway.__del__()


@pytest.mark.parametrize("metadata", [{}, None])
async def test_a_member_without_an_address_does_not_hide_the_others(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, metadata: Any
) -> None:
    gateway = await make_gateway(monkeypatch)
    REGISTRY.publish(POOL, [Member(GroupId("g"), metadata), SECOND])
    await asyncio.sleep(0)
    assert server.addresses == ["host:2"]
    await gateway.__del__()


@pytest.mark.usefixtures("server")
async def test_a_group_that_could_not_start_ends_without_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(*_: Any, **__: Any) -> None:
        raise ConfigError("cannot start")

    monkeypatch.setattr(GroupServer, "start", start)
    failed: Any = ReplicaGroup.__new__(ReplicaGroup)
    with pytest.raises(ConfigError, match="cannot start"):
        await failed.__init__(CONFIG)
    await failed.__del__()


async def test_a_gateway_that_could_not_listen_ends_without_another_error(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.Event()

    async def listen() -> None:
        raise ConfigError("cannot start")

    async def close() -> None:
        closed.set()

    monkeypatch.setattr(server, "listen", listen)
    monkeypatch.setattr(server, "close", close, raising=False)
    failed: Any = Gateway.__new__(Gateway)
    await failed.__init__(CONFIG)
    monkeypatch.setattr(deployments, "_handle", lambda *_: FakeHandle())
    with pytest.raises(ConfigError, match="cannot start"):
        await failed.reconfigure(to_json(listed_in(CONFIG)))
    assert closed.is_set()
    await failed.__del__()
