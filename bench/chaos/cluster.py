"""The cluster of `bench.chaos`: hosts as network namespaces, with Ray and Quire on them.

head                no work
front1, front2      a gateway each
a, b                a replica group each; a's files are on a disk of `DISK_BYTES`
c                   without work, until `Cluster.add_group` gives it one
client              the clients, without Ray
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos.app import LIVES
from bench.chaos.clients import Clients
from bench.namespaces import Network
from bench.ray_hosts import RayHosts, pids_that_run
from prometheus_client.parser import text_string_to_metric_families

FRONTS = ("front1", "front2")
GROUPS = ("a", "b")
THIRD_GROUP = "c"
DISK_BYTES = 256 * 2**20
GRPC_PORT, HTTP_PORT = 50051, 8000
_READY_S = 240.0
_POLL_S = 0.1

_DEPLOY = """
import json, sys
from bench.chaos.app import deploy
deploy(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(frozen=True, kw_only=True)
class Life:
    """A replica group's, as it tells of itself."""

    group: str
    pid: int
    ranks: tuple[int, ...]
    address: str


class NotReady(Exception):
    """The cluster did not come back; the message says what is missing."""


class Cluster:
    """Made by `cluster_under_fire`."""

    def __init__(
        self, network: Network, ray: RayHosts, *, folder: Path, settings: Mapping[str, Any]
    ) -> None:
        self.network = network
        self.ray = ray
        self.folder = folder
        self.settings = dict(settings)
        self.clients = self.new_clients()

    @property
    def gateways(self) -> list[str]:
        return [f"{self.network.hosts[name].address}:{GRPC_PORT}" for name in FRONTS]

    def new_clients(self) -> Clients:
        return Clients(self.network.hosts["client"])

    def start_node(self, name: str) -> None:
        kind = "quire_gateway" if name in FRONTS else "quire_group"
        self.ray.start_node(name, {kind: 1})

    def deploy(self, *, loss: Mapping[str, float] = {}, **changes: Any) -> None:
        """Starts or upgrades the application. ``changes`` to the settings are kept."""
        self.settings |= changes
        self._args = {"settings": self.settings, "loss": dict(loss)}
        self.scale(len(GROUPS))

    def scale(self, num_groups: int) -> None:
        """Deploys ``num_groups`` groups, and changes nothing else."""
        self._num_groups = num_groups
        self.ray.run_on_head(_DEPLOY, self.ray.address, json.dumps(self._args), str(num_groups))

    def add_group(self) -> None:
        """Adds a third group, if there are two. Returns once it serves; raises NotReady."""
        if self._num_groups == len(GROUPS):
            self.start_node(THIRD_GROUP)
            self.scale(len(GROUPS) + 1)
            self.wait_ready()

    def lives(self) -> dict[str, Life]:
        """The running groups, by host."""
        hosts = {host.address: name for name, host in self.network.hosts.items()}
        found = {}
        for path in (self.folder / "lives").glob("*.json"):
            values = json.loads(path.read_text())
            life = Life(**{**values, "ranks": tuple(values["ranks"])})
            if _is_running(life.pid):
                found[hosts[life.address]] = life
        return found

    def gateway_pid(self, host: str) -> int:
        (pid,) = pids_that_run(self.network.hosts[host], "ServeReplica:quire:Gateway")
        return pid

    def metrics(self, front: str) -> dict[str, dict[str, float]] | None:
        """A gateway's metrics by name and label values; ``None`` if it does not answer."""
        url = f"http://{self.network.hosts[front].address}:{HTTP_PORT}/metrics"
        try:
            with (
                self.network.hosts["client"].inside(),
                urllib.request.urlopen(url, timeout=5) as page,
            ):
                text = page.read().decode()
        except OSError:
            return None
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # All are of one model.
                labels = " ".join(v for name, v in sample.labels.items() if name != "model")
                found.setdefault(sample.name, {})[labels] = sample.value
        return found

    def total(self, name: str) -> float:
        """A metric over all its labels and both gateways.

        Raises:
            NotReady: One does not answer.
        """
        return sum(value for front in FRONTS for value in self._values(front, name).values())

    def _values(self, front: str, name: str) -> dict[str, float]:
        metrics = self.metrics(front)
        if metrics is None:
            raise NotReady(f"{front} does not answer")
        return metrics.get(name, {})

    def wait_exact_directories(self) -> None:
        """Until both gateways believe that groups hold as many blocks as they do, while idle.

        Raises:
            NotReady: They do not after minutes.
        """
        self._wait(self._inexact)

    def wait_known(self) -> None:
        """Until all groups and gateways are there and know each other.

        Raises:
            NotReady: They are not after minutes.
        """
        self._wait(self._unknown)

    def wait_ready(self) -> None:
        """And until they are idle. Raises NotReady."""
        self._wait(lambda: self._unknown() or self._busy())

    def _wait(self, trouble: Callable[[], str]) -> None:
        limit_s = time.monotonic() + _READY_S
        while what := trouble():
            if time.monotonic() > limit_s:
                raise NotReady(what)
            time.sleep(_POLL_S)

    def _unknown(self) -> str:
        """Why the cluster is not whole yet; "" if it is."""
        lives = self.lives()
        if len(lives) != self._num_groups:
            return f"{len(lives)} of {self._num_groups} groups run"
        for front in FRONTS:
            metrics = self.metrics(front)
            if metrics is None:
                return f"{front} does not answer"
            if metrics["quire_ready_groups"][""] != self._num_groups:
                return f"{front} has {metrics['quire_ready_groups']['']:.0f} groups"
            known = {*metrics["quire_group_held_blocks"]}
            if known != {life.group for life in lives.values()}:
                return f"{front} knows other groups: {sorted(known)}"
        return ""

    def _busy(self) -> str:
        held = self.total("quire_group_held_blocks")
        return f"blocks are held: {held:.0f}" if held else ""

    def _inexact(self) -> str:
        for front in FRONTS:
            known = sum(self._values(front, "quire_directory_holdings").values())
            there = sum(self._values(front, "quire_group_cached_blocks").values())
            if known != there:
                return (
                    f"{front} believes groups to hold {known:.0f} blocks, and they do {there:.0f}"
                )
        return ""


def _is_running(pid: int) -> bool:
    """Not a zombie, and not another process with this number."""
    with contextlib.suppress(OSError):
        return "ReplicaGroup" in Path(f"/proc/{pid}/cmdline").read_text()
    return False


@contextlib.contextmanager
def cluster_under_fire(settings: Mapping[str, Any], *, keep_logs: bool) -> Iterator[Cluster]:
    """Starts the whole cluster and stops it after the block."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))  # Sockets in it need a short path.
    try:
        (folder / "lives").mkdir()
        environment = {LIVES: str(folder / "lives")}
        with (
            _disk(folder / "a"),
            Network(["head", *FRONTS, *GROUPS, THIRD_GROUP, "client"]) as network,
            RayHosts(network, folder, environment=environment) as ray,
        ):
            cluster = Cluster(network, ray, folder=folder, settings=settings)
            ray.start_head("head")
            for name in (*FRONTS, *GROUPS):
                cluster.start_node(name)
            cluster.deploy()
            yield cluster
    finally:
        if keep_logs:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """A small disk, for Ray's files of one host."""
    folder.mkdir()
    options = f"size={DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "quire-chaos", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
