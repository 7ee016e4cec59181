"""``quire serve`` as its user runs it: a process, a signal."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from quire.cluster.cli.main import main
from quire.cluster.client import generate
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("ended_by", "send"),
    # To the process alone, as Python and containers do; to its group, as `timeout` and terminals.
    [(signal.SIGINT, os.kill), (signal.SIGTERM, os.killpg)],
)
@pytest.mark.usefixtures("no_process_is_left")
def test_a_signal_lets_a_stream_end_and_leaves_nothing_behind(
    ended_by: signal.Signals, send: Callable[[int, int], None]
) -> None:
    with serving("--num-groups", "1") as (server, grpc_address, _):
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
    """Load alone decides where a request goes, and every group answers it alike."""
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

            pace(0.1)  # Each comes while those before it run.
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
    # What the groups hold is found by those who happen to come by.
    assert starts[-1].num_cached_tokens > 0
    assert re.search(r"^quire_ready_groups 4", metrics, re.MULTILINE)
    assert re.search(r"^quire_directory_blocks 0", metrics, re.MULTILINE)
    assert not errors


@contextlib.contextmanager
def serving(*flags: str, module: str = "quire") -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """``quire serve`` with the demo model, and where it listens: gRPC and HTTP."""
    free = ["--grpc-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", str(32 * 2**20)]
    with subprocess.Popen(
        [sys.executable, "-m", module, "serve", *free, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # A shell's background job ignores it, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        printed = ""
        addresses = re.compile(r"gRPC\s+(\S+).*HTTP\s+http://([^/\s]+)/", re.DOTALL)
        while not (found := addresses.search(printed)):
            line = server.stdout.readline()
            assert line, f"it ended: {server.stderr.read()}"
            printed += line
        try:
            yield server, found[1], found[2]
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGINT)


@pytest.mark.usefixtures("no_process_is_left")
def test_a_group_that_cannot_start_says_why_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--grpc-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", "1000"]
    assert main(["serve", *flags]) == 2
    said = capsys.readouterr()
    assert re.search(
        r"quire: ReplicaGroup: ConfigError: .* 0 blocks .* kv_cache_memory_bytes=\d+ or more",
        said.err,
    )
    assert said.out.count("\n") == 1, "that it starts"
