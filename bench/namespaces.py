"""Emulates a network of several machines on one: network namespaces on one switch.

    with Network(["head", "worker"]) as network:
        head, worker = network.hosts.values()
        server = worker.start([sys.executable, "-m", "http.server", "--bind", worker.address])
        head.run(["curl", worker.address])
        network.cut("head", "worker")    # packets vanish, both ways; connections stay open
        network.heal("head", "worker")

Each host has a loopback of its own and ``eth0``, a veth whose other end is on a bridge in one more
namespace: both ends of every link are inside, and the network of the machine is not touched.
Files and process ids are shared. To speak with a host, be a process on one: nothing leads in from
outside.

When the block ends, however it ends, every process in the namespaces is killed and they are
deleted. What a killed run left behind is deleted by the next one, which knows by the namespaces'
names, of process id and start time, that their owner is gone. Needs root, ``ip`` and ``nft``
(Debian: iproute2, nftables).
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Network
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SUBNET = IPv4Network("10.213.0.0/24")
"""The same for all: networks do not see each other."""

_PREFIX = "quire-"
_TOOLS = {"ip": "iproute2", "nft": "nftables"}
_SWITCH = "switch"
_KILL_S = 10.0

# Dropped where they arrive: a sender whose own packets are dropped is told so by its kernel.
_FIREWALL = """
table ip quire {
  set cut { type ipv4_addr; }
  chain input { type filter hook input priority raw; ip saddr @cut drop; }
}
"""


class NoNamespaces(Exception):
    """This machine cannot have network namespaces, or not now; the message says why."""


def why_not() -> str | None:
    """The tool or right that this machine lacks for a `Network`; ``None`` if it has all."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        packages = " ".join(missing.values())
        return f"{', '.join(missing)}: not installed (apt-get install {packages})"
    try:
        # A container may be root and yet have no right to them, or a kernel without a table.
        with Network(["probe"]):
            return None
    except NoNamespaces as error:
        return str(error)


class Host:
    """One machine of a `Network`."""

    def __init__(self, namespace: str, *, name: str, address: str) -> None:
        self.namespace = namespace
        self.name = name
        self.address = address
        self._started: list[subprocess.Popen[Any]] = []

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets and processes that this thread opens and starts in the block are on this host.

        Not ``ip netns exec``: it also mounts another /sys, where cgroups are missing.
        """
        with (
            Path("/proc/thread-self/ns/net").open() as home,
            Path(f"/run/netns/{self.namespace}").open() as there,
        ):
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; ``options`` are those of `subprocess.run`."""
        with self.inside():
            return subprocess.run(argv, **{"check": True, "text": True} | options)

    def start(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Starts a process; ``options`` are those of `subprocess.Popen`. The end of the network is
        the end of the process and of this side of its pipes."""
        with self.inside():
            process: subprocess.Popen[Any] = subprocess.Popen(argv, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """The ids of all processes on this host."""
        return _pids(self.namespace)

    def power_off(self) -> None:
        """Kills every process on this host at once. Its address stays."""
        _kill_all(self.namespace)
        for process in self._started:
            process.wait()

    def close(self) -> None:
        """Once its processes are dead, closes this side of their pipes."""
        for process in self._started:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


class Network:
    """Hosts, and the links between them. A context manager, to be used once.

    Raises:
        NoNamespaces: When entered; nothing is left of it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        prefix = f"{_PREFIX}{os.getpid()}-{_start_time(os.getpid())}-{time.monotonic_ns():x}-"
        self._switch = prefix + _SWITCH
        self.hosts = {
            name: Host(prefix + name, name=name, address=str(address))
            for name, address in zip(names, SUBNET.hosts(), strict=False)
        }
        assert _SWITCH not in self.hosts, f"{_SWITCH!r} is the switch"

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def cut(self, one: str, other: str) -> None:
        """From now on neither hears the other: no reset, no refusal, silence."""
        self._firewall("add", one, other)

    def heal(self, one: str, other: str) -> None:
        self._firewall("delete", one, other)

    @contextlib.contextmanager
    def cut_between(self, one: str, other: str) -> Iterator[None]:
        self.cut(one, other)
        try:
            yield
        finally:
            self.heal(one, other)

    def _firewall(self, verb: str, one: str, other: str) -> None:
        for at, peer in ((one, other), (other, one)):
            host, address = self.hosts[at], self.hosts[peer].address
            with host.inside():
                _run(["nft", f"{verb} element ip quire cut {{ {address} }}"])

    def _build(self) -> None:
        _run(["ip", "netns", "add", self._switch])
        _run(["ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge"])
        _run(["ip", "-n", self._switch, "link", "set", "bridge", "up"])
        for port, host in enumerate(self.hosts.values()):
            inside = ["ip", "-n", host.namespace]
            at_switch = ["ip", "-n", self._switch, "link"]
            _run(["ip", "netns", "add", host.namespace])
            _run([*inside, "link", "set", "lo", "up"])
            far_end = ["peer", "name", f"port{port}", "netns", self._switch]
            _run([*inside, "link", "add", "eth0", "type", "veth", *far_end])
            _run([*at_switch, "set", f"port{port}", "master", "bridge", "up"])
            _run([*inside, "addr", "add", f"{host.address}/{SUBNET.prefixlen}", "dev", "eth0"])
            _run([*inside, "link", "set", "eth0", "up"])
            with host.inside():
                _run(["nft", "-f", "-"], stdin=_FIREWALL)

    def _remove(self) -> None:
        _delete([*(host.namespace for host in self.hosts.values()), self._switch])
        for host in self.hosts.values():
            host.close()


def remove_stale() -> None:
    """Deletes what runs have left behind that could not clean up."""
    stale = []
    for namespace in _namespaces():
        if namespace.startswith(_PREFIX):
            pid, start_time = namespace.removeprefix(_PREFIX).split("-")[:2]
            if _start_time(int(pid)) != int(start_time):
                stale.append(namespace)
    _delete(stale)


def _delete(namespaces: Sequence[str]) -> None:
    there = _namespaces()
    for namespace in namespaces:
        if namespace in there:
            _kill_all(namespace)
            _run(["ip", "netns", "delete", namespace])


def _kill_all(namespace: str) -> None:
    """Again and again: what is killed may just have started another process."""
    deadline = time.monotonic() + _KILL_S
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise NoNamespaces(f"{namespace}: processes {pids} do not end when they are killed")
        time.sleep(0.01)


def _pids(namespace: str) -> list[int]:
    """The dead that nobody has waited for yet have left their namespaces and are not among them."""
    return [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split()]


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines()]


def _start_time(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; ``None`` for one that is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _enter(namespace: int) -> None:
    """Moves this thread to the namespace of an open file."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise NoNamespaces(f"setns: {os.strerror(ctypes.get_errno())}")


def _run(argv: Sequence[str], *, stdin: str | None = None) -> str:
    try:
        result = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NoNamespaces(f"{argv[0]}: not installed") from error
    if result.returncode != 0:
        raise NoNamespaces(f"{' '.join(argv)}: {result.stderr.strip()}")
    return result.stdout
