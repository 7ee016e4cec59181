"""Gateways scale up and down under a real Ray Serve while streams continue."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from ray import serve
from tests.served.conftest import APP_NAME, CONFIG, marked_processes, paced_cluster
from tests.served.test_scaling import prompt, run, wait_until

from quire.cluster.deploy.app import Endpoints
from quire.cluster.features.autoscale.settings import GatewayAutoscaling

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_STREAMS = 6


@pytest.fixture(scope="module")
def scaled(pace_file: Path) -> Iterator[Endpoints]:
    config = replace(
        CONFIG,
        engine=replace(CONFIG.engine, tensor_parallel_size=1),
        num_groups=1,
        gateway_autoscaling=GatewayAutoscaling(max_gateways=2, target_inflight=4, down_delay_s=1),
        drain_timeout_s=60,
    )
    with marked_processes(), paced_cluster(config) as endpoints:
        yield endpoints


def test_a_gateway_comes_with_the_load_and_goes_after_it(
    scaled: Endpoints, pace: Callable[[float], None]
) -> None:
    prompts = [prompt(number, num_tokens=20) for number in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as pool, grpc.insecure_channel(scaled.grpc) as channel:
        expected = [run(channel, each, 100)[2] for each in prompts]
        assert num_gateways() == 1
        pace(0.2)  # Streams last longer than a gateway takes to start.
        streams = [pool.submit(run, channel, each, 100) for each in prompts]
        wait_until(lambda: num_gateways() == 2)
        pace(0)
        assert [each.result()[2] for each in streams] == expected
        wait_until(lambda: num_gateways() == 1)
        assert run(channel, prompts[0], 100)[2] == expected[0]


def num_gateways() -> int:
    """Number of gateways that run or are stopping."""
    states = serve.status().applications[APP_NAME].deployments["Gateway"].replica_states
    return sum(n for state, n in states.items() if state in ("RUNNING", "STOPPING"))
