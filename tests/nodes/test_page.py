"""Runs the commands of ``docs/several-nodes.md`` unchanged on two hosts in network namespaces."""

import json
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.namespaces import Network, why_not
from bench.ray_hosts import pids_that_run
from tests.page_blocks import blocks, environment

from quire import demo_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SMALL = "--kv-cache-memory-bytes 33554432 --num-threads 1 --drain-timeout-s 1"


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="quire-"))  # pytest's are too long for sockets.
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def network() -> Iterator[Network]:
    reason = why_not() or (None if shutil.which("curl") else "curl is not installed")
    if reason is not None:
        pytest.skip(reason)
    with Network(["first", "second"]) as made:
        yield made


def test_the_pages_commands_serve_a_model_from_two_machines(network: Network, folder: Path) -> None:
    token, head, node, serve, ask, stop = (
        each.text for each in blocks("docs/several-nodes.md", "sh")
    )
    hosts = network.hosts
    (folder / "bin").mkdir()
    variables = environment(folder / "bin")

    def command(name: str, text: str) -> list[str]:
        """The page's command with the token and the hosts of this network."""
        for given, host in (("10.0.0.1", "first"), ("10.0.0.2", "second")):
            text = text.replace(given, hosts[host].address)
        text = text.replace("MODEL", str(demo_model.PATH)).replace(
            "quire serve", f"quire serve {SMALL}"
        )
        variables["RAY_TMPDIR"] = str(folder / name)
        (folder / name).mkdir(exist_ok=True)
        return ["sh", "-euc", f"{token}\nexec {text}"]

    def run(name: str, text: str) -> str:
        told = hosts[name].run(
            command(name, text),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        return str(told.stdout)

    small = " --num-cpus=2 --object-store-memory=83886080"
    assert "started" in run("first", head.strip() + small + " --include-dashboard=false")
    assert "started" in run("second", node.strip() + small)
    with (folder / "serve.log").open("w") as log:
        server = hosts["first"].start(
            command("first", serve), env=variables, stdout=log, stderr=log, cwd=folder
        )
        printed = ""
        # Ray chooses the machine of the gateway.
        while not (gateway := re.search(r"HTTP +http://([0-9.]+):8000/v1", printed)):
            assert server.poll() is None, printed
            time.sleep(0.2)
            printed = (folder / "serve.log").read_text()
        ranks = [len(pids_that_run(hosts[name], "RankActor")) for name in hosts]
        answer = json.loads(run("first", ask.replace("10.0.0.1", gateway[1])))
        server.send_signal(signal.SIGINT)
        ended = server.wait(timeout=120)
    assert ranks == [1, 1]
    assert answer["usage"]["completion_tokens"] == 8
    assert ended == 0, (folder / "serve.log").read_text()
    assert "Stopped" in run("second", stop) + run("first", stop)
