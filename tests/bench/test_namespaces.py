"""Hosts in network namespaces: which of them reach each other, and their removal."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ECHO = """
import socketserver, sys
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(100):
            self.request.sendall(data)
with socketserver.ThreadingTCPServer((sys.argv[1], 7), Echo) as server:
    print("listening", flush=True)
    server.serve_forever()
"""
# An input line has a timeout in seconds and a word: sends the word, prints the answer or "silence".
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7), timeout=60) as connection:
    print("connected", flush=True)
    for line in sys.stdin:
        patience_s, word = line.split()
        connection.settimeout(float(patience_s))
        connection.sendall(f"{word}\\n".encode())
        try:
            print(connection.recv(100).decode().strip(), flush=True)
        except TimeoutError:
            print("silence", flush=True)
"""


@pytest.fixture
def namespaces(bench_module: Callable[[str], ModuleType]) -> Iterator[Any]:
    module = bench_module("namespaces")
    reason = module.why_not()
    if reason is not None:
        pytest.skip(reason)
    yield module
    assert not _namespaces_of(os.getpid()), "namespaces are left behind"


def test_a_cut_silences_two_hosts_and_no_others_until_it_heals(namespaces: Any) -> None:
    with namespaces.Network(["a", "b", "c"]) as network:
        a, b, c = network.hosts.values()
        server = _talking(a, ECHO, a.address)
        assert server.stdout.readline() == "listening\n"
        clients = {host.name: _talking(host, CLIENT, a.address) for host in (b, c)}

        def say(name: str, word: str, *, patience_s: int = 60) -> str:
            client = clients[name]
            client.stdin.write(f"{patience_s} {word}\n")
            client.stdin.flush()
            return str(client.stdout.readline()).strip()

        for client in clients.values():
            assert client.stdout.readline() == "connected\n"
        assert [say("b", "one"), say("c", "one")] == ["one", "one"]
        with network.cut_between("a", "b"):
            assert [say("b", "two", patience_s=1), say("c", "two")] == ["silence", "two"]
        # The connection still stands, and TCP sends lost data again.
        heard = [say("b", "three") for _ in range(5)]
        assert any("two" in words for words in heard)

        a.power_off()
        assert server.wait() == -signal.SIGKILL
        assert not a.pids()
        assert c.pids() == [clients["c"].pid]
    assert clients["c"].returncode == -signal.SIGKILL


def test_no_route_leads_from_a_host_to_the_machine_around_it(namespaces: Any) -> None:
    with namespaces.Network(["a"]) as network:
        routes = network.hosts["a"].run(["ip", "route"], stdout=subprocess.PIPE).stdout
        assert [line.split()[0] for line in routes.splitlines()] == [str(namespaces.SUBNET)]


SCRIPT = """
import time
from bench.namespaces import Network
network = Network(["left"]).__enter__()
process = network.hosts["left"].start(["sleep", "600"])
print(process.pid, flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_leaves_is_removed_by_the_next(namespaces: Any) -> None:
    root = Path(namespaces.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
    ) as script:
        assert script.stdout is not None
        left = int(script.stdout.readline())
        with namespaces.Network(["next"]):
            assert len(_namespaces_of(script.pid)) == 2, "their owner lives"
        script.kill()
    with namespaces.Network(["next"]):
        assert not _namespaces_of(script.pid)
    while _runs(left):
        time.sleep(0.01)


def test_a_network_that_cannot_be_built_leaves_nothing(namespaces: Any) -> None:
    with (
        pytest.raises(namespaces.NoNamespaces, match="ip netns add"),
        namespaces.Network(["good", "no/name"]),
    ):
        pass


def test_it_is_said_what_is_missing(
    bench_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = bench_module("namespaces")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert module.why_not() == "network namespaces need root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "nft" else tool)
    assert module.why_not() == "nft: not installed (apt-get install nftables)"


def _talking(host: Any, program: str, *args: str) -> Any:
    return host.start(
        [sys.executable, "-c", program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _runs(pid: int) -> bool:
    """Whether a process runs. Zombies do not count, since init may not reap them here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"quire-{pid}-")]
