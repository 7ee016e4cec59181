"""``quire upgrade``: another process gives what `quire serve` runs new settings."""

import socket
import subprocess
import sys
import threading

import httpx
import pytest
from tests.served.serve_process import ROOT, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]


def upgrade(*flags: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "quire", "upgrade", "--kv-cache-memory-bytes", str(2**25), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def test_an_upgrade_by_name_replaces_the_single_gateway_under_its_clients() -> None:
    ports = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    same = ["--name", "chat", *ports, "--max-queue-wait-s", "1000"]
    is_over = threading.Event()
    failures: list[str] = []
    num_answers = 0

    def ask(url: str) -> None:
        nonlocal num_answers
        body = {"prompt": "A", "max_tokens": 8}
        with httpx.Client(timeout=None) as client:
            while not is_over.is_set():
                try:
                    answer = client.post(f"{url}/v1/completions", json=body)
                    num_answers += 1
                    if answer.status_code != 200:
                        failures.append(answer.text)
                except httpx.HTTPError as error:
                    failures.append(repr(error))

    with serving(*same) as (server, _, http):
        assert server.stdout is not None
        ray = ["--ray-address", server.stdout.readline().split()[1]]
        url = f"http://{http}"
        (before,) = httpx.get(f"{url}/v1/models").json()["data"]
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        other = upgrade(*ray, *ports, "--name", "another")
        done = upgrade(*ray, *same, "--start-first", "--max-num-seqs", "8")
        (after,) = httpx.get(f"{url}/v1/models").json()["data"]
        is_over.set()
        asking.join()
    assert other.returncode == 2
    assert all(line.startswith("  … ") for line in other.stdout.splitlines())
    assert "no such application; there are: chat" in other.stderr
    assert done.returncode == 0, done.stderr
    assert "Upgraded chat" in done.stdout
    assert after["created"] > before["created"], "by another gateway"
    assert failures == []
    assert num_answers > 0
