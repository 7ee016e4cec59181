"""One gateway, ready to serve: its models, each with a routing table and connections to its groups,
behind gRPC and HTTP servers."""

import asyncio
import contextlib
import errno
import logging
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from quire.cluster.config import ClusterConfig
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.edge.grpc_guard import GrpcGuard
from quire.cluster.edge.grpc_server import build_grpc_server
from quire.cluster.edge.leaving import listeners_at, stop_listening_at, wait_until_left
from quire.cluster.edge.limits import GRPC_LEAVE_S, allowed_connections
from quire.cluster.edge.listener import HttpListener, listening_socket
from quire.cluster.edge.openai_http import build_http_app, build_metrics_app
from quire.cluster.failover.resume import CompletionConfig
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.group_link import GroupContact, grpc_connect
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.node_adapters import NodeAdapters
from quire.cluster.serving.adapters import AskOthers, nobody_knows
from quire.cluster.serving.models import Models
from quire.cluster.serving.service import GatewayConfig, ModelService
from quire.cluster.tls import ServerTls
from quire.router.table import RoutingTable
from quire.worker.api.errors import ConfigError
from quire.worker.api.scoring import LogitScore
from quire.worker.model.hub import fetch_text_files
from quire.worker.model.pooling import read_scoring
from quire.worker.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MAX_METRICS_CONNECTIONS = 64
_METRICS_PORTS = 64
"""How many ports from ``metrics_port`` on are tried."""


def new_table(
    config: ClusterConfig, make: Callable[..., RoutingTable] = RoutingTable
) -> RoutingTable:
    """Where policies draw lots, each gateway draws its own."""
    return make(
        block_size=config.engine.block_size,
        config=config.routing,
        first_ordinal=random.getrandbits(32),
    )


class GatewayServer:
    """Made by `start`; belongs to the event loop that made it."""

    def __init__(
        self,
        config: ClusterConfig,
        read: Sequence[tuple[Tokenizer, LogitScore | None]],
        *,
        make_table: Callable[[ClusterConfig], RoutingTable] = new_table,
    ) -> None:
        # Files first: they may be unusable, and then nothing has begun yet.
        keys = ApiKeys.load(config.api_keys_file) if config.api_keys_file else None
        self.tls: ServerTls | None = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self.tls = ServerTls(certificate=config.tls_certificate, key=config.tls_key)
        # By model and address.
        self._contacts: dict[str, dict[str, GroupContact]] = {name: {} for name in config.models}
        models = zip(config.models.values(), read, self._contacts.values(), strict=True)
        self.models = Models(
            *(
                _service(each, *of_model, table=make_table(each), contacts=contacts)
                for each, of_model, contacts in models
            ),
            aliases={alias: name for name, each in config.models.items() for alias in each.aliases},
        )
        self.grpc_address = ""
        """``host:port`` for clients, as is the next."""
        self.http_address = ""
        self.metrics_address = ""
        """Where this gateway alone answers ``/metrics`` and ``/health``."""
        limits = config.connections()
        limits = replace(limits, max_connections=allowed_connections(limits.max_connections))
        telemetry = self.models.telemetry
        self._grpc_guard = GrpcGuard(
            limits,
            cut=lambda reason: telemetry.cut_grpc_connections.labels(reason).inc(),
        )
        self._grpc = build_grpc_server(
            self.models, keys=keys, limits=limits, guard=self._grpc_guard
        )
        self._http = HttpListener(
            build_http_app(
                self.models,
                keys=keys,
                allow_origins=config.allow_origins,
                ignore_unknown_fields=config.ignore_unknown_fields,
            ),
            limits=limits,
            tls=self.tls.http_context if self.tls is not None else None,
            drain_timeout_s=config.drain_timeout_s,
            cut=lambda reason: telemetry.cut_connections.labels(reason).inc(),
        )
        telemetry.max_connections.set(limits.max_connections)
        telemetry.grpc_connections.set_function(lambda: self._grpc_guard.num_connections)
        telemetry.connections.set_function(lambda: len(self._http.connections.open))
        # With room of its own: what happens to clients is to be seen when they find none.
        self._metrics = HttpListener(
            build_metrics_app(self.models, keys=None if config.open_metrics else keys),
            limits=replace(limits, max_connections=_MAX_METRICS_CONNECTIONS),
            tls=self.tls.http_context if self.tls is not None else None,
        )
        self._tls_task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: ClusterConfig,
        *,
        make_table: Callable[[ClusterConfig], RoutingTable] = new_table,
        ask_others: AskOthers = nobody_knows,
    ) -> Self:
        """Listens on the configured ports. It has no groups until it is given addresses.

        ``make_table`` makes a model's table to route by. ``ask_others`` asks the other gateways for
        adapters.

        Raises:
            ConfigError: A port is in use, or a certificate or key file cannot be.
            CheckpointError: The model's tokenizer cannot be fetched or read.
        """
        read = [await asyncio.to_thread(_read, each) for each in config.models.values()]
        self = cls(config, read, make_table=make_table)
        try:
            adapters = self.models.adapters
            adapters.hear(await ask_others())
            for name, each in config.models.items():
                if each.engine.enable_lora:
                    modules = {module.name: module.path for module in each.lora_modules}
                    await adapters.configure(name, modules)
            await self._listen(config)
        except BaseException:
            await self.models.close()
            raise
        _log.info(
            "gateway of %s listens: gRPC %s, HTTP %s, metrics of its own %s",
            ", ".join(config.models),
            self.grpc_address,
            self.http_address,
            self.metrics_address,
        )
        return self

    def set_groups(self, contacts: Iterable[GroupContact], *, model: str | None = None) -> None:
        """Makes the groups that run known, for a model or the only one; replaces its former
        ones."""
        service = self.models.named(model)
        known = self._contacts[service.model]
        known.clear()
        known.update((contact.address, contact) for contact in contacts)
        service.groups.set_addresses(known)

    def listeners(self) -> Iterator[socket.socket]:
        """Duplicates of the sockets that listen for clients; the caller closes them."""
        for address in (self.grpc_address, self.http_address):
            yield from listeners_at(int(address.rpartition(":")[2]))

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Takes no new request, lets those at hand end, then closes every connection."""
        _log.info("stops; %d completions may take %g s", self.models.num_inflight, drain_timeout_s)
        self.models.begin_drain()
        await asyncio.gather(
            self._stop_grpc(drain_timeout_s), self._http.stop(), return_exceptions=True
        )
        self._grpc_guard.stop()
        await self._metrics.stop()
        if self._tls_task is not None:
            self._tls_task.cancel()
            await asyncio.gather(self._tls_task, return_exceptions=True)
        await self.models.close()
        _log.info("stopped; %d completions were cut off", self.models.num_inflight)

    async def _stop_grpc(self, drain_timeout_s: float) -> None:
        """A call that comes in the moment in which gRPC's server stops is cancelled. So clients
        are first let go to the other gateways, as the age of their connections tells them to."""
        host, _, port = self.grpc_address.rpartition(":")
        await stop_listening_at(int(port))
        await wait_until_left(host, int(port), timeout_s=GRPC_LEAVE_S)
        await self._grpc.stop(drain_timeout_s)

    async def _listen(self, config: ClusterConfig) -> None:
        with contextlib.ExitStack() as on_failure:
            http_socket = _listening_socket("http_port", config.host, config.http_port)
            on_failure.callback(http_socket.close)
            metrics_socket = _metrics_socket(config.host, config.metrics_port)
            on_failure.callback(metrics_socket.close)
            try:
                grpc_port = self._add_grpc_port(f"{config.host}:{config.grpc_port}")
                await self._grpc.start()
                self._grpc_guard.start(grpc_port)
            except RuntimeError as error:
                raise ConfigError(
                    f"grpc_port={config.grpc_port}: {config.host} cannot listen there: {error}"
                ) from error
            on_failure.pop_all()
        self.grpc_address = f"{config.host}:{grpc_port}"
        self.http_address = f"{config.host}:{http_socket.getsockname()[1]}"
        self.metrics_address = f"{config.host}:{metrics_socket.getsockname()[1]}"
        self._http.start(http_socket)
        self._metrics.start(metrics_socket)
        if self.tls is not None:
            self._tls_task = asyncio.create_task(self.tls.follow())

    def _add_grpc_port(self, address: str) -> int:
        if self.tls is None:
            return self._grpc.add_insecure_port(address)
        return self._grpc.add_secure_port(address, self.tls.grpc_credentials())


def _read(config: ClusterConfig) -> tuple[Tokenizer, LogitScore | None]:
    folder = fetch_text_files(config.engine.model)
    return Tokenizer.load(folder, chat_template=config.chat_template), read_scoring(folder)


def _service(
    config: ClusterConfig,
    tokenizer: Tokenizer,
    scoring: LogitScore | None,
    *,
    table: RoutingTable,
    contacts: Mapping[str, GroupContact],
) -> ModelService:
    keeper = NodeAdapters(config.engine) if config.engine.enable_lora else None
    groups = Groups(
        table=table,
        expected=Expectation(model=config.model_name, block_size=config.engine.block_size),
        config=GroupClientConfig(
            silence_timeout_s=config.silence_timeout_s,
            step_deadline_s=config.step_deadline_s,
            follow_events=config.routing.use_directory,
        ),
        connect=partial(grpc_connect, contacts=contacts),
        adapter_folder=keeper.folder if keeper is not None else lambda digest: None,
    )
    return ModelService(
        model=config.model_name,
        tokenizer=tokenizer,
        scoring=scoring,
        keeper=keeper,
        groups=groups,
        table=table,
        config=_gateway_config(config),
    )


def _gateway_config(config: ClusterConfig) -> GatewayConfig:
    settings = config.autoscaling
    completion = CompletionConfig(
        group_wait_s=config.group_wait_s, max_group_deaths=config.max_group_deaths
    )
    wakes_groups = settings is not None and not settings.min_groups
    if settings is not None and wakes_groups:
        # The first group's start may be what a request waits for.
        completion = replace(completion, group_wait_s=settings.start_wait_s)
    return GatewayConfig(
        wakes_groups=wakes_groups,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        completion=completion,
        admission=config.admission(),
    )


def _listening_socket(name: str, host: str, port: int, *, is_shared: bool = True) -> socket.socket:
    """Raises ConfigError."""
    try:
        return listening_socket(host, port, is_shared=is_shared)
    except OSError as error:
        raise ConfigError(f"{name}={port}: {host} cannot listen there: {error}") from error


def _metrics_socket(host: str, first_port: int) -> socket.socket:
    """On the first port that is free. Raises ConfigError."""
    for port in range(first_port, min(first_port + _METRICS_PORTS, 65535)):
        try:
            return listening_socket(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break
    return _listening_socket("metrics_port", host, first_port, is_shared=False)
