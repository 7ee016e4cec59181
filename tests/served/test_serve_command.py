"""``quire serve`` as its user runs it: a process, a signal."""

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from quire.cluster.cli import main
from quire.cluster.client import generate
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("no_process_is_left")
def test_a_signal_lets_a_stream_end_and_leaves_nothing_behind(ended_by: signal.Signals) -> None:
    flags = ["--num-groups", "1", "--grpc-port", "0", "--http-port", "0"]
    flags += ["--kv-cache-memory-bytes", str(32 * 2**20)]
    with subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        printed = ""
        while not (address := re.search(r"gRPC\s+(\S+)", printed)):
            line = server.stdout.readline()
            assert line, f"it ended: {server.stderr.read()}"
            printed += line
        with grpc.insecure_channel(address[1]) as channel, ThreadPoolExecutor(1) as pool:
            sampling = pb.SamplingParams(max_tokens=300, ignore_eos=True)
            stream = generate(channel, pb.GenerateRequest(text="Once", sampling=sampling))
            next(stream)
            rest = pool.submit(list, stream)
            server.send_signal(ended_by)
            assert rest.result(timeout=60)[-1].usage.num_output_tokens == 300
        printed, errors = server.communicate(timeout=60)
    assert server.returncode == 0, errors
    assert "Draining" in printed
    assert printed.rstrip().endswith("Stopped.")
    assert not errors


@pytest.mark.usefixtures("no_process_is_left")
def test_a_group_that_cannot_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--grpc-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", "1000"]
    assert main(["serve", *flags]) == 2
    assert re.search(
        r"quire: ReplicaGroup: ConfigError: .* 0 blocks .* kv_cache_memory_bytes=\d+ or more",
        capsys.readouterr().err,
    )
