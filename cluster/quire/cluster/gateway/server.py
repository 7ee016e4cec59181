"""One gateway, ready to serve: routing table, connections to groups, gRPC and HTTP servers."""

import asyncio
import logging
import random
import socket
from collections.abc import Callable
from typing import Self

import uvicorn

from quire.cluster.auth import ApiKeys
from quire.cluster.config import ClusterConfig
from quire.cluster.failover.completion_request import CompletionConfig
from quire.cluster.failover.resume import ResumeConfig
from quire.cluster.gateway.grpc_server import build_grpc_server
from quire.cluster.gateway.service import Gateway, GatewayConfig
from quire.cluster.http.openai_http import build_http_app
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.tls import ServerTls
from quire.router.table import RoutingTable
from quire.worker.errors import ConfigError
from quire.worker.text import Tokenizer

_log = logging.getLogger(__name__)


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

    def __init__(self, config: ClusterConfig, tokenizer: Tokenizer, *, table: RoutingTable) -> None:
        # Files first: they may be unusable, and then nothing has begun yet.
        keys = ApiKeys.load(config.api_keys_file) if config.api_keys_file else None
        self.tls: ServerTls | None = None
        if config.tls_certificate is not None and config.tls_key is not None:
            self.tls = ServerTls(certificate=config.tls_certificate, key=config.tls_key)
        self.table = table
        self.groups = Groups(
            table=table,
            expected=Expectation(model=config.model_name, block_size=config.engine.block_size),
            config=GroupClientConfig(
                silence_timeout_s=config.silence_timeout_s,
                step_deadline_s=config.step_deadline_s,
                follow_events=config.routing.use_directory,
            ),
        )
        self.gateway = Gateway(
            model=config.model_name,
            tokenizer=tokenizer,
            groups=self.groups,
            table=table,
            config=_gateway_config(config),
        )
        self.grpc_address = ""
        """``host:port`` for clients, as is the next."""
        self.http_address = ""
        self._grpc = build_grpc_server(self.gateway, keys=keys)
        tls = self.tls
        self._http = uvicorn.Server(
            uvicorn.Config(
                build_http_app(self.gateway, keys=keys, allow_origins=config.allow_origins),
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
                ssl_context_factory=(lambda *_: tls.http_context) if tls is not None else None,
            )
        )
        self._http_task: asyncio.Task[None] | None = None
        self._tls_task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: ClusterConfig, *, table: RoutingTable | None = None) -> Self:
        """Listens on the configured ports. It has no groups until it is given addresses.

        ``table`` is to route by, instead of one made as ``config.routing`` says.

        Raises:
            ConfigError: A port is in use, or a certificate or key file cannot be.
            CheckpointError: The model's tokenizer cannot be read.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.engine.model)
        if table is None:
            table = new_table(config)
        self = cls(config, tokenizer, table=table)
        try:
            await self._listen(config)
        except BaseException:
            await self.groups.close()
            raise
        _log.info(
            "gateway of %s listens: gRPC %s, HTTP %s",
            config.model_name,
            self.grpc_address,
            self.http_address,
        )
        return self

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Takes no new request, lets those at hand end, then closes every connection."""
        _log.info("stops; %d completions may take %g s", self.gateway.num_inflight, drain_timeout_s)
        self.gateway.begin_drain()
        self._http.should_exit = True
        stopping = [asyncio.ensure_future(self._grpc.stop(drain_timeout_s))]
        if self._http_task is not None:
            stopping.append(self._http_task)
        await asyncio.gather(*stopping, return_exceptions=True)
        if self._tls_task is not None:
            self._tls_task.cancel()
            await asyncio.gather(self._tls_task, return_exceptions=True)
        await self.groups.close()
        _log.info("stopped; %d completions were cut off", self.gateway.num_inflight)

    async def _listen(self, config: ClusterConfig) -> None:
        http_socket = _http_socket(config.host, config.http_port)
        try:
            grpc_port = self._add_grpc_port(f"{config.host}:{config.grpc_port}")
            await self._grpc.start()
        except RuntimeError as error:
            http_socket.close()
            raise ConfigError(
                f"grpc_port={config.grpc_port}: {config.host} cannot listen there: {error}"
            ) from error
        self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]))
        if self.tls is not None:
            self._tls_task = asyncio.create_task(self.tls.follow())
        self.grpc_address = f"{config.host}:{grpc_port}"
        self.http_address = f"{config.host}:{http_socket.getsockname()[1]}"

    def _add_grpc_port(self, address: str) -> int:
        if self.tls is None:
            return self._grpc.add_insecure_port(address)
        return self._grpc.add_secure_port(address, self.tls.grpc_credentials())


def _gateway_config(config: ClusterConfig) -> GatewayConfig:
    resume = ResumeConfig(max_group_deaths=config.max_group_deaths)
    settings = config.autoscaling
    if settings is None or settings.min_groups:
        return GatewayConfig(
            completion=CompletionConfig(resume=resume), admission=config.admission()
        )
    # The first group's start may be what a request waits for.
    completion = CompletionConfig(group_wait_s=settings.start_wait_s, resume=resume)
    return GatewayConfig(wakes_groups=True, completion=completion, admission=config.admission())


def _http_socket(host: str, port: int) -> socket.socket:
    """A listening socket that the other gateways of this node can share."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"http_port={port}: {host} cannot listen there: {error}") from error
    return listener
