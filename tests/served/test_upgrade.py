"""``quire upgrade`` applies new settings to the cluster of a running `quire serve`."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.served.serve_process import ROOT, serving

from quire import demo_model

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


def test_an_upgrade_keeps_the_groups_of_models_that_stay_as_they_were(tmp_path: Path) -> None:
    other = shutil.copytree(demo_model.PATH, tmp_path / "other")
    ports = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    # A fixed number; otherwise threads per group depend on the number of groups.
    same = ["--name", "chat", *ports, "--num-threads", "1"]
    demo = str(demo_model.PATH)

    def groups(url: str) -> dict[str, str]:
        """The group of each model, as named by a routing decision."""
        found = {}
        for each in httpx.get(f"{url}/v1/models").json()["data"]:
            body = {"model": each["id"], "prompt": "A", "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=None)
            assert answer.status_code == 200, answer.text
            query = {"request_id": answer.json()["id"]}
            (decision,) = httpx.get(f"{url}/v1/routing/decisions", params=query).json()["data"]
            found[each["id"]] = decision["routing"]["group"]
        return found

    with serving(*same, demo) as (server, _, http):
        assert server.stdout is not None
        ray = ["--ray-address", server.stdout.readline().split()[1]]
        url = f"http://{http}"
        alone = groups(url)
        assert upgrade(*ray, *same, demo, str(other)).returncode == 0
        both = groups(url)
        assert upgrade(*ray, *same, demo, str(other)).returncode == 0
        again = groups(url)
        assert upgrade(*ray, *same, demo).returncode == 0
        last = groups(url)
        template = tmp_path / "template.jinja"
        template.write_text("{{ 'A' * 100 }}")
        chat = ["--chat-template", str(template), "--routing-policy", "round_robin"]
        assert upgrade(*ray, *same, *chat, demo).returncode == 0
        messages = [{"role": "user", "content": "A"}]
        body = {"model": demo_model.PATH.name, "messages": messages, "max_tokens": 1}
        deadline = time.monotonic() + 60  # Gateways apply it while they run.
        while True:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=None).json()
            if answer["usage"]["prompt_tokens"] >= 50 or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert answer["usage"]["prompt_tokens"] >= 50
        assert groups(url) == last
    name = demo_model.PATH.name
    assert alone.keys() == {name}
    assert both == again == alone | {"other": both["other"]}
    assert last == alone
