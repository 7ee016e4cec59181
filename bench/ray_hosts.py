"""A Ray cluster of several nodes on this machine: a raylet on each host of a `bench.namespaces`.

    with Network(["head", "front", "a", "b"]) as network, RayHosts(network, folder) as ray:
        ray.start_head("head")
        ray.start_node("front", {"quire_gateway": 1})
        grpc, http = ray.deploy({"num_groups": 2, ...})

Processes of the cluster show each other a token, as they do in the Helm chart, and have its
settings for how soon a silent node is lost and how long they go on without the head.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from bench.namespaces import Host, Network

PORT = 6379
_OBJECT_STORE_BYTES = 80 * 2**20
_STARTED = "Ray runtime started."
_NUM_TRIES = 10
"""Ray gives up on a node that is not there after 30 s, which on a busy machine may be too soon."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}

_DEPLOY = """
import json, sys
from quire.cluster.deploy.local import ray_session
with ray_session(address=sys.argv[1]):
    from ray import serve
    from quire.cluster.deploy.build import build_gateways, build_groups, checked
    from quire.cluster.deploy.listed import listed_in
    from quire.cluster.deploy.names import application_of, part_of
    from quire.cluster.settings import config_from
    config, _ = checked(config_from(json.loads(sys.argv[2])))
    part = part_of(config.model_name)
    serve.start(proxy_location="Disabled")
    serve.run(build_groups(config, part), name=application_of("quire", part), route_prefix=None)
    gateways = build_gateways(config, listed_in(config))
    handle = serve.run(gateways, name="quire", route_prefix=None)
    handle.wait_for_groups.remote([config.model_name]).result()
    print("addresses", json.dumps(handle.addresses.remote().result()), flush=True)
"""


class RayHosts:
    """The raylets of a network. They end with it."""

    def __init__(
        self, network: Network, folder: Path, *, environment: Mapping[str, str] = {}
    ) -> None:
        """``folder`` is for Ray's files. Its path must be short: there are sockets in it."""
        self._hosts = network.hosts
        self._folder = folder
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            # The head's state survives it, so that one in its place finds the cluster.
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(folder / "head-state"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **environment,
        }
        (folder / "head-state").mkdir()
        self._log = (folder / "ray.log").open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._log.close()

    def start_head(self, name: str, *flags: str) -> "subprocess.Popen[Any]":
        """The head runs nothing of ours."""
        self._head = name
        # A head in another's place has an empty disk; else it would take itself for running.
        (self._folder / name / "ray_current_cluster").unlink(missing_ok=True)
        self.address = f"{self._hosts[name].address}:{PORT}"
        flags = ("--head", f"--port={PORT}", "--include-dashboard=False", *flags)
        return self._start(name, {}, *flags)

    def start_node(self, name: str, resources: Mapping[str, float]) -> "subprocess.Popen[Any]":
        return self._start(name, resources, f"--address={self.address}")

    def deploy(self, settings: Mapping[str, Any]) -> tuple[str, str]:
        """Starts Quire and returns the addresses of a gateway, gRPC and HTTP."""
        printed = self.run_on_head(_DEPLOY, self.address, json.dumps(settings))
        line = next(line for line in printed.splitlines() if line.startswith("addresses "))
        grpc, http = json.loads(line.removeprefix("addresses "))
        return grpc, http

    def run_on_head(self, script: str, *args: str) -> str:
        """The output of a driver. It must be on the head: with no network around it, Ray takes the
        head's raylet, whose sockets are files, for the one of its own node."""
        return self.run(self._head, script, *args)

    def run(self, name: str, script: str, *args: str) -> str:
        """The output of a Python script on host ``name``."""
        return (
            self._hosts[name]
            .run(
                [sys.executable, "-c", script, *args],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=self._folder,
            )
            .stdout
        )

    def start(self, name: str, script: str, *args: str) -> "subprocess.Popen[Any]":
        """A Python script on host ``name`` that one reads from while it runs."""
        return self._hosts[name].start(
            [sys.executable, "-c", script, *args],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=self._folder,
            text=True,
        )

    def _start(
        self, name: str, resources: Mapping[str, float], *flags: str
    ) -> "subprocess.Popen[Any]":
        """Returns when the node is there."""
        for _ in range(_NUM_TRIES):
            log = self._folder / f"{name}.log"
            with log.open("w") as stdout:
                process = self._launch(name, resources, flags, stdout)
            while process.poll() is None:
                if _STARTED in log.read_text():
                    return process
                time.sleep(0.1)
            self._hosts[name].power_off()
        raise RuntimeError(f"host {name}: no node after {_NUM_TRIES} tries:\n{log.read_text()}")

    def _launch(
        self, name: str, resources: Mapping[str, float], flags: Sequence[str], log: IO[str]
    ) -> "subprocess.Popen[Any]":
        host = self._hosts[name]
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            f"--node-ip-address={host.address}",
            "--num-cpus=0",
            f"--resources={json.dumps(dict(resources))}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            f"--temp-dir={self._folder / name}",
            "--disable-usage-stats",
            "--include-log-monitor=False",
            *flags,
        ]
        return host.start(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self._folder,
        )


def pids_that_run(host: Host, words: str) -> list[int]:
    """The processes on a host with ``words`` in their command line or title."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            if words in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                found.append(pid)
    return found
