"""Groups that come and go under a real Ray Serve: from none, to none, and again."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from quire.cluster.app import APP_NAME, Endpoints
from quire.cluster.client import generate
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_request_wakes_a_group_which_goes_again_when_idle(scaled_endpoints: Endpoints) -> None:
    with grpc.insecure_channel(scaled_endpoints.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert num_groups() == 0
        reply = health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        first = ask(channel)
        wait_until(lambda: num_groups() == 0)
        with ThreadPoolExecutor(4) as pool:
            again = list(pool.map(lambda _: ask(channel), range(4)))
        assert again == [first] * 4


def ask(channel: grpc.Channel) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    chunks = list(generate(channel, pb.GenerateRequest(text="A whale is", sampling=sampling)))
    assert len(chunks) > 1, "it did not stream"
    assert chunks[-1].usage.num_output_tokens == 16
    return [token for chunk in chunks for token in chunk.token_ids]


def num_groups() -> int:
    status = serve.status().applications[APP_NAME].deployments["ReplicaGroup"]
    return sum(status.replica_states.values())


def wait_until(condition: Callable[[], bool]) -> None:
    """The bound only ends a test that has failed."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.1)
