"""The private parts of Ray that Quire uses, each with the function that is lost without it.

A part without a ``loss`` is required: if it is missing, nothing is started (`check_ray`). If one of
the others is missing, `Part.get` is ``None``, and a warning says once what does not work.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any

from quire.cluster.private import known_loss, unknown_version

_log = logging.getLogger(__name__)

TESTED = ("2.60.0", "2.60.0")
"""The lowest and the highest version of Ray that Quire was tested with. Before 2.60 Serve has no
``max_surge_percent``, with which groups are replaced."""
_INSTALL = "ray[serve]>=2.60,<2.61"


@dataclass(frozen=True)
class Part:
    """A name in one of Ray's modules, with dots for an attribute of a class."""

    module: str
    name: str
    loss: str | None = None
    """What does not work without the part. ``None``: Quire requires it."""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def owner(self) -> ModuleType | None:
        """The module, if it exists and has the name; else ``None``."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if self.module.startswith(f"{error.name}."):
                return None  # A parent package is missing.
            if error.name != self.module:
                raise
            return None
        try:
            attrgetter(self.name)(module)
        except AttributeError:
            return None
        return module

    def get(self) -> Any:
        """The part's value. If it is missing: ``None`` if Quire can do without it, else raises
        ConfigError."""
        owner = self.owner()
        if owner is not None:
            return attrgetter(self.name)(owner)
        if self.loss is None:
            raise unknown_version("ray", [str(self)], tested=TESTED, install=_INSTALL)
        _warn(self)
        return None

    def put(self, value: Any) -> None:
        """Replaces the value from now on. Has no effect if `get` is None."""
        self.get()
        if (owner := self.owner()) is not None:
            setattr(owner, self.name, value)

    @contextlib.contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Replaces the value while the block runs. Has no effect if `get` is None."""
        previous = self.get()
        owner = self.owner()
        if owner is None:
            yield
            return
        setattr(owner, self.name, value)
        try:
            yield
        finally:
            setattr(owner, self.name, previous)


HAS_CLUSTERS = Part("ray._private.ray_constants", "ENABLE_RAY_CLUSTER")
"""Whether Ray supports several machines; if not, it listens on 127.0.0.1 alone."""
GLOBAL_NODE = Part("ray._private.worker", "_global_node")
"""The node that this process is connected to; ``None`` through a proxy."""
SET_SIGTERM_HANDLER = Part("ray._private.utils", "set_sigterm_handler")
"""Called when Ray starts; its handler would end only Ray's processes, and exit."""

NODE = Part("ray._private.node", "Node")
_OF_NODES = tuple(
    Part(NODE.module, f"Node.{name}")
    for name in ("gcs_address", "raylet_socket_name", "get_logs_dir_path", "kill_all_processes")
)

CONNECT = Part(
    "ray._private.worker", "connect", "a signal while Ray connects may crash this process"
)
BINDS_LIVES = Part(
    "ray._private.utils",
    "detect_fate_sharing_support",
    "a signal to this process's whole group ends Ray before streams are drained",
)
"""Whether a process can be bound to the life of another."""
POPEN = Part("ray._private.services", "ConsolePopen", BINDS_LIVES.loss)
"""Starts Ray's processes."""
RESOURCES = Part(
    "ray._private.resource_and_label_spec",
    "ResourceAndLabelSpec",
    "settings for which this machine has no room are refused only after Ray has started",
)
"""What a node of this machine would have."""
USE_TOKEN = Part(
    "ray._private.authentication.authentication_token_setup",
    "maybe_enable_token_auth_if_token_available",
    "a cluster that wants a token needs RAY_AUTH_MODE=token in the environment",
)
CONNECTS_BY_ITSELF = Part(
    "ray._private.auto_init_hook",
    "enable_auto_connect",
    "a thread of Serve's may start another Ray cluster after the end, where gateways are scaled",
)
"""Whether a call to Ray without a connection connects first."""
FORGET_CLIENT = Part(
    "ray.serve.context", "_set_global_client", "a process can start one cluster only"
)
GET_CLIENT = Part(
    "ray.serve.context",
    "_get_global_client",
    "a cluster of a Serve configuration is not told from others when its models change",
)
ADD_PORT = Part(
    "ray.serve._private.replica",
    "add_port_to_grpc_server",
    "replicas have a port that may be open to the network, and Ray unpickles what it receives: "
    "close all ports but the gateways' to others",
)
"""Opens the port of a replica for calls between deployments."""

ALL = (
    *(HAS_CLUSTERS, GLOBAL_NODE, SET_SIGTERM_HANDLER),
    *(NODE, *_OF_NODES),
    *(CONNECT, BINDS_LIVES, POPEN, RESOURCES, USE_TOKEN, CONNECTS_BY_ITSELF),
    *(FORGET_CLIENT, GET_CLIENT, ADD_PORT),
)


def check_ray() -> None:
    """Raises ConfigError: the installed version of Ray lacks parts that Quire needs."""
    missing = [str(part) for part in ALL if part.loss is None and part.owner() is None]
    if missing:
        raise unknown_version("ray", missing, tested=TESTED, install=_INSTALL)


@functools.cache
def _warn(part: Part) -> None:
    assert part.loss is not None
    _log.warning("%s", known_loss("ray", str(part), part.loss, tested=TESTED, install=_INSTALL))
