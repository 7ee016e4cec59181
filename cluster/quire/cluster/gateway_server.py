"""One gateway, ready to serve: routing table, connections to groups, gRPC and HTTP servers."""

import asyncio
import socket
from typing import Self

import uvicorn

from quire.cluster.config import ClusterConfig
from quire.cluster.gateway_service import Gateway
from quire.cluster.groups import Groups
from quire.cluster.grpc_server import build_grpc_server
from quire.cluster.model_card import Expectation
from quire.cluster.openai_http import build_http_app
from quire.router.table import RoutingTable
from quire.worker.errors import ConfigError
from quire.worker.text import Tokenizer


class GatewayServer:
    """Made by `start`; belongs to the event loop that made it."""

    def __init__(self, config: ClusterConfig, tokenizer: Tokenizer) -> None:
        self.table = RoutingTable(block_size=config.engine.block_size)
        self.groups = Groups(
            table=self.table,
            expected=Expectation(model=config.model_name, block_size=config.engine.block_size),
        )
        self.gateway = Gateway(
            model=config.model_name, tokenizer=tokenizer, groups=self.groups, table=self.table
        )
        self.grpc_address = ""
        """``host:port`` for clients, as is the next."""
        self.http_address = ""
        self._grpc = build_grpc_server(self.gateway)
        self._http = uvicorn.Server(
            uvicorn.Config(
                build_http_app(self.gateway),
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
            )
        )
        self._http_task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: ClusterConfig) -> Self:
        """Listens on the configured ports. It has no groups until it is given addresses.

        Raises:
            ConfigError: A port is in use.
            CheckpointError: The model's tokenizer cannot be read.
        """
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.engine.model)
        self = cls(config, tokenizer)
        http_socket = _listen(config.host, config.http_port)
        try:
            grpc_port = self._grpc.add_insecure_port(f"{config.host}:{config.grpc_port}")
        except RuntimeError as error:
            http_socket.close()
            raise ConfigError(
                f"grpc_port={config.grpc_port}: {config.host} cannot listen there: {error}"
            ) from error
        await self._grpc.start()
        self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]))
        self.grpc_address = f"{config.host}:{grpc_port}"
        self.http_address = f"{config.host}:{http_socket.getsockname()[1]}"
        return self

    async def stop(self, *, drain_timeout_s: float) -> None:
        """Takes no new request, lets those at hand end, then closes every connection."""
        self.gateway.begin_drain()
        self._http.should_exit = True
        stopping = [asyncio.ensure_future(self._grpc.stop(drain_timeout_s))]
        if self._http_task is not None:
            stopping.append(self._http_task)
        await asyncio.gather(*stopping, return_exceptions=True)
        await self.groups.close()


def _listen(host: str, port: int) -> socket.socket:
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
