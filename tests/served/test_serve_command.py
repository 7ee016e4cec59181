"""``quire serve`` as a user runs it: started as a process and ended by a signal."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from tests.hub_server import Repository, files_of, hub_server
from tests.served.serve_process import serving

from quire import demo_model
from quire.cluster.cli.main import main
from quire.cluster.tools.generate import generate
from quire.llm import LLM, SamplingParams
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize(
    ("ended_by", "send"),
    # To the process only, as Python and containers do, or to its group, as `timeout` and terminals.
    [(signal.SIGINT, os.kill), (signal.SIGTERM, os.killpg)],
)
@pytest.mark.usefixtures("no_process_is_left")
def test_a_signal_lets_a_stream_end_and_leaves_nothing_behind(
    ended_by: signal.Signals, send: Callable[[int, int], None]
) -> None:
    with serving("--num-groups", "1", sigint=signal.SIG_IGN) as (server, grpc_address, _):
        with grpc.insecure_channel(grpc_address) as channel, ThreadPoolExecutor(1) as pool:
            sampling = pb.SamplingParams(max_tokens=300, ignore_eos=True)
            stream = generate(channel, pb.GenerateRequest(text="Once", sampling=sampling))
            next(stream)
            rest = pool.submit(list, stream)
            send(server.pid, ended_by)
            assert rest.result()[-1].usage.num_output_tokens == 300
        printed, errors = server.communicate()
    assert server.returncode == 0, errors
    assert "Draining" in printed
    assert printed.rstrip().endswith("Stopped.")
    assert not errors


@pytest.mark.usefixtures("no_process_is_left")
def test_four_groups_serve_without_a_directory(pace: Callable[[float], None]) -> None:
    """Routing goes by load only, and every group gives the same answer."""
    flags = ["--num-groups", "4", "--no-directory", "--routing-policy", "least_loaded"]
    text = "You are a helpful assistant. " * 12
    sampling = pb.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    longer = pb.SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)

    with serving(*flags, module="tests.served.paced_serve") as (
        server,
        grpc_address,
        http_address,
    ):
        with grpc.insecure_channel(grpc_address) as channel, ThreadPoolExecutor(16) as pool:

            def ask(_: int) -> list[pb.GenerateResponse]:
                return list(generate(channel, pb.GenerateRequest(text=text, sampling=sampling)))

            pace(0.1)  # Each arrives while the earlier ones run.
            held = [
                generate(channel, pb.GenerateRequest(text=text, sampling=longer)) for _ in range(4)
            ]
            groups = {next(stream).start.routing.group for stream in held}
            for stream in held:
                stream.close()
            pace(0)
            answers = [*pool.map(ask, range(16)), ask(16)]
        metrics = httpx.get(f"http://{http_address}/metrics", timeout=120).text
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate()
    tokens = {tuple(token for chunk in answer for token in chunk.token_ids) for answer in answers}
    assert len(tokens) == 1
    starts = [answer[0].start for answer in answers]
    assert len(groups) == 4
    assert {start.routing.reason for start in starts} == {"least_loaded"}
    assert {start.routing.predicted_cached_tokens for start in starts} == {0}
    # Only requests that happen to reach a group find its blocks.
    assert starts[-1].num_cached_tokens > 0
    assert re.search(r"^quire_ready_groups{model=.*} 4", metrics, re.MULTILINE)
    assert re.search(r"^quire_directory_blocks{model=.*} 0", metrics, re.MULTILINE)
    assert not errors


@pytest.mark.usefixtures("no_process_is_left")
def test_groups_serve_the_commit_that_a_model_of_the_hub_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are fetched once, and the branch moves before the groups start."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    request = pb.GenerateRequest(text="What is", sampling=sampling)
    with hub_server() as hub:
        repository = hub.repositories["org/demo"] = Repository()
        first = repository.commit(files_of(demo_model.PATH))
        hub.amid_weights = lambda: repository.commit({"config.json": b"{}"})
        for name, value in hub.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        with serving("org/demo", "--num-groups", "2") as (server, grpc_address, http_address):
            with grpc.insecure_channel(grpc_address) as channel:
                chunks = list(generate(channel, request))
            models = httpx.get(f"http://{http_address}/v1/models", timeout=120).json()
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate()
    assert server.returncode == 0, errors
    assert [model["id"] for model in models["data"]] == ["org/demo"]
    assert hub.sent(".safetensors") == ["model.safetensors"]
    assert len(repository.commits) == 2
    assert {each.split("/")[6] for each in hub.requests if "/tree/" in each} == {first}
    with LLM(model=demo_model.PATH, kv_cache_memory_bytes=2**22) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate(request.text, greedy, use_tqdm=False)
    assert [token for chunk in chunks for token in chunk.token_ids] == list(
        output.outputs[0].token_ids
    )


@pytest.mark.usefixtures("no_process_is_left")
def test_too_little_memory_is_refused_once_and_before_ray_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--grpc-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", "1000"]
    assert main(["serve", *flags]) == 2
    said = capsys.readouterr()
    assert re.search(r"quire: .* 0 blocks .* --kv-cache-memory-bytes \d+ or more", said.err)
    assert (said.out + said.err).count("0 blocks") == 1
    assert "logs: " not in said.err


@pytest.mark.usefixtures("no_process_is_left")
def test_a_failed_start_shows_the_traceback_and_keeps_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_NATIVE_ISA", "none")
    assert main(["serve", "--grpc-port", "0", "--http-port", "0", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"^ReplicaGroup: .*Traceback .*in start_ranks\n", said, re.DOTALL | re.MULTILINE
    )
    *_, logs, last = said.splitlines()
    assert last.startswith("quire: ReplicaGroup: ValueError: QUIRE_NATIVE_ISA='none'")
    kept = Path(logs.removeprefix("logs: "))
    assert kept.parent == tmp_path / "logs"
    texts = [path.read_text(errors="replace") for path in kept.rglob("*.log")]
    assert any("QUIRE_NATIVE_ISA='none'" in text for text in texts)
    assert not (kept / "live").is_symlink()


@pytest.mark.usefixtures("no_process_is_left")
def test_status_and_logs_tell_of_a_cluster_that_serves(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as (_, _, http_address):
        httpx.post(f"http://{http_address}/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        status = subprocess.run(
            [sys.executable, "-m", "quire", "status", "--json"], capture_output=True, check=False
        )
        logs = subprocess.run(
            [sys.executable, "-m", "quire", "logs"], capture_output=True, text=True, check=True
        )
    assert status.returncode == 0
    (app,) = json.loads(status.stdout)
    assert app["is_whole"]
    assert app["addresses"]["HTTP"] == http_address
    assert [each["state"] for each in app["models"]] == ["ready"]
    assert "POST /v1/completions 200" in logs.stdout
