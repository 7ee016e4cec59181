"""Two ``quire serve`` on one Ray cluster: each stops its own application and no other."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from tests.served.conftest import marked_processes
from tests.served.serve_process import ROOT, serving

from quire.cluster.tools.generate import generate
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


# A cluster in a separate process, which shares a token with those that connect.
CLUSTER = """
import sys
import ray
from quire.cluster.deploy.local import ray_session

with ray_session():
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Makes Ray keep a loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with marked_processes(), pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as cluster:
            assert cluster.stdout is not None
            yield cluster.stdout.readline().strip()
            cluster.communicate()  # Closing its input ends the cluster.


@pytest.mark.parametrize("first_to_stop", [0, 1])
def test_either_of_two_stops_and_the_other_answers(ray_address: str, first_to_stop: int) -> None:
    with ExitStack() as stack:
        served = [
            stack.enter_context(serving("--ray-address", ray_address, *flags))
            for flags in ((), ("--name", "another", "--served-model-name", "another"))
        ]
        (stopped, _, _), (left, address, _) = served[first_to_stop], served[1 - first_to_stop]
        stopped.send_signal(signal.SIGINT)
        printed, errors = stopped.communicate()
        assert stopped.returncode == 0, errors
        assert printed.rstrip().endswith("Stopped.")
        assert answer(address)
        left.send_signal(signal.SIGINT)
        _, errors = left.communicate()
        assert left.returncode == 0, errors


def test_a_name_or_a_port_in_use_is_refused_and_its_owner_answers(ray_address: str) -> None:
    with serving("--ray-address", ray_address, "--name", "mine") as (_, address, http_address):
        port = http_address.rpartition(":")[2]
        refused = serve(ray_address, "--name", "mine", "--grpc-port", "0", "--http-port", "0")
        assert refused.returncode == 2
        assert "--name mine: this Ray cluster has an application of that name" in refused.stderr
        assert "`quire stop mine`" in refused.stderr
        refused = serve(ray_address, "--name", "other", "--grpc-port", "0", "--http-port", port)
        assert refused.returncode == 2
        assert f"--http-port {port}: cannot listen" in refused.stderr
        assert answer(address)


def test_one_that_nobody_serves_any_more_is_stopped_by_its_name(ray_address: str) -> None:
    with (
        serving("--ray-address", ray_address, "--name", "left") as (_, address, _),
        serving("--ray-address", ray_address, "--name", "orphan") as (orphan, orphaned, _),
    ):
        orphan.kill()
        orphan.wait()
        assert answer(orphaned)
        flags = ["orphan", "--ray-address", ray_address]
        assert quire("stop", *flags).returncode == 0
        with pytest.raises(grpc.RpcError):
            answer(orphaned)
        assert answer(address)
        unknown = quire("stop", *flags)
        assert unknown.returncode == 2
        assert "name='orphan': this Ray cluster has no such application" in unknown.stderr
        assert "there are: left" in unknown.stderr


def answer(address: str) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with grpc.insecure_channel(address) as channel:
        chunks = list(generate(channel, pb.GenerateRequest(text="A whale is", sampling=sampling)))
    return [token for chunk in chunks for token in chunk.token_ids]


def serve(ray_address: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return quire("serve", "--ray-address", ray_address, *flags)


def quire(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
