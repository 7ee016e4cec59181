"""A real Ray cluster on hosts in network namespaces: groups of two ranks, one on each of two nodes.

The tests run in order on one cluster; each continues from the state that the last one left.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.namespaces import Network, why_not
from bench.ray_hosts import RayHosts, pids_that_run

from quire import demo_model
from quire.llm import LLM, SamplingParams

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_TOKENS = 400
CLIENT = """
import json, sys, threading
import grpc
from quire.cluster.tools.generate import generate
from quire.v1 import inference_pb2 as pb

address, num_streams, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
streams = [[] for _ in range(num_streams)]
begun = threading.Barrier(num_streams + 1)

def run(index):
    sampling = pb.SamplingParams(
        temperature=0.9 if index % 2 else 0.0, seed=index, max_tokens=num_tokens, ignore_eos=True
    )
    request = pb.GenerateRequest(text=f"A whale is {index}", sampling=sampling)
    try:
        for chunk in generate(channel, request):
            first = not streams[index]
            streams[index].extend(chunk.token_ids)
            if first:
                begun.wait()
    except BaseException:
        begun.abort()  # Nobody is to wait for one that has failed.
        raise

with grpc.insecure_channel(address) as channel:
    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_streams)]
    for thread in threads:
        thread.start()
    begun.wait()
    print("begun", flush=True)
    for thread in threads:
        thread.join()
print(json.dumps(streams), flush=True)
"""


WAIT_UNTIL_READY = """
import re, sys, time, urllib.request

address, num_groups = sys.argv[1:]
while True:
    page = urllib.request.urlopen(f"http://{address}/metrics").read().decode()
    if re.search(rf"^quire_ready_groups{{.*}} {num_groups}\\.0$", page, re.MULTILINE):
        break
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class Cluster:
    network: Network
    ray: RayHosts
    grpc_address: str
    http_address: str

    def streams(self, num_streams: int) -> Callable[[], list[list[int]]]:
        """Begins greedy and seeded streams; when all have begun, returns how to await them."""
        args = (self.grpc_address, str(num_streams), str(NUM_TOKENS))
        client = self.ray.start("front", CLIENT, *args)
        assert client.stdout is not None
        assert client.stdout.readline() == "begun\n"

        def rest() -> list[list[int]]:
            tokens: list[list[int]] = json.loads(client.communicate(timeout=300)[0])
            return tokens

        return rest

    def ranks(self, host: str) -> list[int]:
        """Process ids of ranks on a host."""
        return pids_that_run(self.network.hosts[host], "RankActor")

    def all_ranks(self) -> set[int]:
        return {*self.ranks("a"), *self.ranks("b")}

    def wait_until_whole(self, *, num_kept: int, of: set[int]) -> None:
        """Returns once two groups are ready, with ``num_kept`` of the ranks ``of`` before."""
        eventually(
            lambda: (
                len(self.ranks("a")) == len(self.ranks("b")) == 2
                and len(self.all_ranks() & of) == num_kept
            )
        )
        self.ray.run("front", WAIT_UNTIL_READY, self.http_address, "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="quire-"))  # pytest's are too long for sockets.
    try:
        with (
            Network(["head", "front", "a", "b"]) as network,
            RayHosts(network, folder) as ray,
        ):
            ray.start_head("head")
            ray.start_node("front", {"quire_gateway": 1})
            for name in ("a", "b"):
                ray.start_node(name, {"quire_group": 2})
            addresses = ray.deploy(
                {
                    "engine": {
                        "tensor_parallel_size": 2,
                        "dtype": "float32",
                        "device": "cpu",
                        "num_blocks": 512,
                        "num_threads": 1,
                        "max_num_seqs": 16,
                        "max_num_batched_tokens": 256,
                        "step_timeout_s": 60,
                    },
                    "num_groups": 2,
                    "nodes_per_group": 2,
                    "group_resource": "quire_group",
                    "group_host": "auto",
                    "gateway_resource": "quire_gateway",
                    "host": network.hosts["front"].address,
                    "drain_timeout_s": 2,
                }
            )
            yield Cluster(network, ray, *addresses)
    finally:
        if "QUIRE_KEEP_LOGS" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The offline engine's answers, with one rank."""
    with LLM(demo_model.PATH, dtype="float32", num_blocks=512, num_threads=1) as llm:
        outputs = llm.generate(
            [f"A whale is {index}" for index in range(6)],
            [
                SamplingParams(
                    temperature=0.9 if index % 2 else 0.0,
                    seed=index,
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                )
                for index in range(6)
            ],
            use_tqdm=False,
        )
    return [output.outputs[0].token_ids for output in outputs]


def test_ranks_are_on_different_nodes_and_tokens_are_those_of_one_rank(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    assert (len(cluster.ranks("a")), len(cluster.ranks("b"))) == (2, 2)
    assert cluster.streams(6)() == expected


def test_a_killed_rank_fails_its_group_alone_and_the_group_is_replaced(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    before = cluster.all_ranks()
    rest = cluster.streams(6)
    os.kill(cluster.ranks("b")[0], signal.SIGKILL)
    assert rest() == expected
    cluster.wait_until_whole(num_kept=2, of=before)  # The other group's ranks are unchanged.
    assert cluster.streams(6)() == expected


def test_streams_and_new_requests_do_not_need_the_head(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    rest = cluster.streams(6)
    cluster.network.hosts["head"].power_off()
    assert rest() == expected
    assert cluster.streams(6)() == expected
    # Failover does not need the head either, though no group is replaced.
    rest = cluster.streams(6)
    os.kill(cluster.ranks("a")[0], signal.SIGKILL)
    assert rest() == expected


def test_a_head_in_its_place_finds_the_cluster_and_replaces_what_was_lost(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    eventually(lambda: len(cluster.all_ranks()) == 2)  # The lost group's other rank is gone too.
    kept = cluster.all_ranks()
    rest = cluster.streams(6)
    cluster.ray.start_head("head")
    assert rest() == expected
    cluster.wait_until_whole(num_kept=2, of=kept)  # Surviving ranks are kept.
    assert cluster.streams(6)() == expected


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds; the time limit only ends failed tests."""
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.2)
