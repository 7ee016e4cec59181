"""One gateway: its models, and the gRPC and HTTP servers in front of them."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Self

from quire.cluster.config import ClusterConfig, GatewaySettings, ListenSettings
from quire.cluster.deploy.served_model import ServedModel, new_table, read_model
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.edge.grpc_server import build_grpc_server
from quire.cluster.edge.openai_http import build_http_app, build_metrics_app
from quire.cluster.features.adapters.catalog import AskOthers, nobody_knows
from quire.cluster.features.guard.grpc_guard import GrpcGuard
from quire.cluster.features.guard.leaving import listeners_at, stop_listening_at, wait_until_left
from quire.cluster.features.guard.limits import GRPC_LEAVE_S, ConnectionLimits, allowed_connections
from quire.cluster.features.guard.listener import HttpListener, listening_socket
from quire.cluster.features.installed import INSTALLED
from quire.cluster.features.tracing.tracing import new_span_id, start_tracing
from quire.cluster.gateway.models import Models
from quire.cluster.links.group_link import GroupContact
from quire.cluster.telemetry.access_log import log_access
from quire.cluster.tls import ServerTls
from quire.router.table import RoutingTable
from quire.worker.request.errors import ConfigError
from quire.worker.request.settings import part

_log = logging.getLogger(__name__)

_MAX_METRICS_CONNECTIONS = 64
_METRICS_PORTS = 64
"""Number of ports that are tried, from ``metrics_port`` on."""


class GatewayServer:
    """A gateway. `start` makes one that serves; it belongs to that event loop."""

    def __init__(self, config: GatewaySettings) -> None:
        """A new gateway has no models and does not listen. Raises ConfigError: a file cannot be
        used, or spans cannot be sent as configured."""
        self.keys = ApiKeys.load(config.api_keys_file) if config.api_keys_file else None
        self.tls: ServerTls | None = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self.tls = ServerTls(certificate=config.tls_certificate, key=config.tls_key)
        self.models = Models()
        self.models.on_finished.append(log_access)
        self._traces = start_tracing(
            config.otlp_traces_endpoint, role="gateway", instance=f"gateway-{new_span_id()}"
        )
        if self._traces is not None:
            self.models.trace_to(self._traces)
        if self.keys is not None:
            tell_of_tenants(self.models, self.keys)
        self.grpc_address = ""
        """``host:port`` for gRPC clients; ``http_address`` is that for HTTP."""
        self.http_address = ""
        self.metrics_address = ""
        """The address at which only this gateway answers ``/metrics`` and ``/health``."""
        self._config = config
        self._served: dict[str, ServedModel] = {}
        self._tasks: list[asyncio.Task[None]] = []
        """The tasks that look for changed files."""

    @classmethod
    async def start(
        cls,
        config: ClusterConfig,
        *,
        make_table: Callable[[ClusterConfig], RoutingTable] = new_table,
        ask_others: AskOthers = nobody_knows,
    ) -> Self:
        """Makes a gateway with the configured models that listens on the configured ports. The
        models have no groups until `set_groups`.

        ``make_table`` makes a model's routing table. ``ask_others`` asks the other gateways for
        adapters.

        Raises:
            ConfigError: A port is in use, or a certificate or key file cannot be used.
            CheckpointError: A model's tokenizer cannot be fetched or read.
        """
        read = [await asyncio.to_thread(read_model, each) for each in config.models.values()]
        self = cls(config)
        try:
            for of_model in read:
                served = ServedModel(of_model, table=make_table(of_model.config))
                self._served[served.service.model] = served
                self.models.put(served.service)
            self.models.aliases = {
                alias: name for name, each in config.models.items() for alias in each.aliases
            }
            self.models.adapters.hear(await ask_others())
            for each in config.each_model:
                await self.models.configure_adapters(each.model_name, each.modules)
            await self.listen()
        except BaseException:
            await self.models.close()
            raise
        return self

    async def listen(self) -> None:
        """Begins to serve clients. Raises ConfigError: a port is in use."""
        config = self._config
        max_connections = allowed_connections(config.max_connections)
        limits = part(ConnectionLimits, config, max_connections=max_connections)
        telemetry = self.models.telemetry
        self._grpc_guard = GrpcGuard(
            limits,
            cut=lambda reason: telemetry.cut_grpc_connections.labels(reason).inc(),
        )
        self._grpc = build_grpc_server(
            self.models,
            features=INSTALLED,
            keys=self.keys,
            limits=limits,
            guard=self._grpc_guard,
        )
        self._http = HttpListener(
            build_http_app(
                self.models,
                features=INSTALLED,
                keys=self.keys,
                allow_origins=config.allow_origins,
                ignore_unknown_fields=config.ignore_unknown_fields,
            ),
            limits=limits,
            tls=self.tls.http_context if self.tls is not None else None,
            drain_timeout_s=config.drain_timeout_s,
            cut=lambda reason: telemetry.cut_connections.labels(reason).inc(),
            finish=self.models.finished,
        )
        telemetry.max_connections.set(limits.max_connections)
        telemetry.grpc_connections.set_function(lambda: self._grpc_guard.num_connections)
        telemetry.connections.set_function(lambda: len(self._http.connections.open))
        # With limits of its own: metrics must be readable when clients find no room.
        self._metrics = HttpListener(
            build_metrics_app(self.models, keys=None if config.open_metrics else self.keys),
            limits=replace(limits, max_connections=_MAX_METRICS_CONNECTIONS),
            tls=self.tls.http_context if self.tls is not None else None,
        )
        await self._listen(config)
        _log.info(
            "gateway of %s listens: gRPC %s, HTTP %s, metrics of its own %s",
            ", ".join(self.models.by_name) or "no model",
            self.grpc_address,
            self.http_address,
            self.metrics_address,
        )

    def set_groups(self, contacts: Iterable[GroupContact], *, model: str | None = None) -> None:
        """Replaces the running groups of a model that `start` made, by default the only one."""
        self._served[self.models.named(model).model].set_groups(contacts)

    def listeners(self) -> Iterator[socket.socket]:
        """Yields duplicates of the sockets that listen for clients; the caller closes them."""
        for address in (self.grpc_address, self.http_address):
            yield from listeners_at(int(address.rpartition(":")[2]))

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Refuses new requests, lets running ones end within ``drain_timeout_s``, then closes every
        connection."""
        _log.info("stops; %d completions may take %g s", self.models.num_inflight, drain_timeout_s)
        self.models.begin_drain()
        await asyncio.gather(
            self._stop_grpc(drain_timeout_s), self._http.stop(), return_exceptions=True
        )
        self._grpc_guard.stop()
        await self._metrics.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.models.close()
        if self._traces is not None:
            await self._traces.close()
        _log.info("stopped; %d completions were cut off", self.models.num_inflight)

    async def _stop_grpc(self, drain_timeout_s: float) -> None:
        """Stops the gRPC server. It would cancel calls that arrive at that moment, so this waits
        until clients have left for other gateways, at the maximum age of their connections."""
        host, _, port = self.grpc_address.rpartition(":")
        await stop_listening_at(int(port))
        await wait_until_left(host, int(port), timeout_s=GRPC_LEAVE_S)
        await self._grpc.stop(drain_timeout_s)

    async def _listen(self, config: ListenSettings) -> None:
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
        self.models.live.name = f"{socket.gethostname()} {self.http_address}"
        self.models.live.start()
        self._http.start(http_socket)
        self._metrics.start(metrics_socket)
        self._tasks += [
            asyncio.create_task(each.follow()) for each in (self.tls, self.keys) if each is not None
        ]

    def _add_grpc_port(self, address: str) -> int:
        if self.tls is None:
            return self._grpc.add_insecure_port(address)
        return self._grpc.add_secure_port(address, self.tls.grpc_credentials())


def tell_of_tenants(models: Models, keys: ApiKeys) -> None:
    """Passes the tenants' policies to the models, now and whenever the keys change, and exports
    metrics of the keys file."""

    def on_change() -> None:
        models.tenants.set_policies(keys.policies)

    on_change()
    keys.watch(on_change)
    models.telemetry.keys_read.set_function(lambda: keys.loaded_s)
    models.telemetry.keys_unusable.set_function(lambda: bool(keys.trouble))


def _listening_socket(name: str, host: str, port: int, *, is_shared: bool = True) -> socket.socket:
    """A socket that listens on the configured port ``name``. Raises ConfigError: it cannot."""
    try:
        return listening_socket(host, port, is_shared=is_shared)
    except OSError as error:
        raise ConfigError(f"{name}={port}: {host} cannot listen there: {error}") from error


def _metrics_socket(host: str, first_port: int) -> socket.socket:
    """A socket that listens on the first free port. Raises ConfigError: there is none."""
    for port in range(first_port, min(first_port + _METRICS_PORTS, 65535)):
        try:
            return listening_socket(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break
    return _listening_socket("metrics_port", host, first_port, is_shared=False)
