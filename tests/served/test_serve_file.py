"""A cluster from a Serve configuration file, which is changed and redeployed during a stream."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from tests.served.conftest import marked_processes
from tests.served.test_upgrade import free_port

from quire import demo_model
from quire.cluster.deploy.local import ray_session
from quire.cluster.tools.generate import generate
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GATEWAYS, GROUPS = "filed", "filed:demo"
NUM_TOKENS = 40
OF_GROUPS: dict[str, Any] = {
    "served_model_name": "demo",
    "engine": {
        "model": str(demo_model.PATH),
        "dtype": "float32",
        "num_blocks": 512,
        "max_num_seqs": 16,
        "num_threads": 1,
    },
    "drain_timeout_s": 60,
}


class Filed:
    """The cluster and its configuration file."""

    def __init__(self) -> None:
        self.grpc, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._ports = {
            name: int(address.rpartition(":")[2])
            for name, address in (("grpc_port", self.grpc), ("http_port", self.http))
        }

    def deploy(self, *, of_groups: dict[str, Any], of_gateways: dict[str, Any]) -> None:
        """Deploys the file; returns once Serve has applied it."""
        applications = [
            {
                "name": GATEWAYS,
                "import_path": "quire.cluster.deploy.app:application",
                "args": {**of_groups, **self._ports, **of_gateways},
            },
            {
                "name": GROUPS,
                "import_path": "tests.served.paced_app:groups",
                "args": of_groups,
            },
        ]
        file = {"applications": [{**each, "route_prefix": None} for each in applications]}
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate(file))
        for name in (GATEWAYS, GROUPS):
            while (status := serve.status().applications[name]).status != "RUNNING":
                assert status.status not in ("DEPLOY_FAILED", "UNHEALTHY"), status.message
                time.sleep(0.1)

    def routes(self) -> str:
        """The routing policy that a gateway reports."""
        body = {"model": "demo", "prompt": "A", "max_tokens": 1}
        done = httpx.post(f"http://{self.http}/v1/completions", json=body, timeout=60).json()
        query = {"request_id": done["id"]}
        answer = httpx.get(f"http://{self.http}/v1/routing/decisions", params=query).json()
        return str(answer["data"][0]["policy"])


@pytest.fixture(scope="module")
def filed(pace_file: Path) -> Iterator[Filed]:
    with marked_processes(), ray_session():
        serve.start(proxy_location="Disabled")
        cluster = Filed()
        cluster.deploy(of_groups=OF_GROUPS, of_gateways={})
        handle = serve.get_deployment_handle("Gateway", app_name=GATEWAYS)
        assert handle.wait_for_groups.remote(["demo"]).result() == []
        yield cluster
        for name in (GATEWAYS, GROUPS):
            serve.delete(name)


def processes(app: str) -> set[int]:
    """Process ids of the running replicas of an application's deployment."""
    details = _get_global_client().get_serve_details()  # type: ignore[union-attr]
    (deployment,) = details["applications"][app]["deployments"].values()
    return {each["pid"] for each in deployment["replicas"] if each["state"] == "RUNNING"}


def request() -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(text="A whale is", sampling=sampling)


def tokens(stream: Iterator[pb.GenerateResponse]) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def test_groups_stay_and_streams_go_on_as_settings_of_gateways_change(
    filed: Filed, pace: Callable[[float], None]
) -> None:
    with grpc.insecure_channel(filed.grpc) as channel:
        alone = tokens(generate(channel, request()))
        groups, gateways = processes(GROUPS), processes(GATEWAYS)
        assert (len(groups), len(gateways), filed.routes()) == (1, 1, "prefix_aware")
        pace(0.2)
        stream = generate(channel, request())
        across = list(next(stream).token_ids)
        changed = {
            "routing": {"policy": "round_robin"},
            "max_inflight": 100,
            "chat_template": "{{ 'A' * 100 }}",
        }
        filed.deploy(of_groups=OF_GROUPS, of_gateways=changed)
        pace(0)
        across += tokens(stream)
    assert len(alone) == NUM_TOKENS
    assert across == alone
    assert filed.routes() == "round_robin"
    assert processes(GROUPS) == groups


def test_a_setting_of_groups_replaces_them(filed: Filed) -> None:
    groups = processes(GROUPS)
    filed.deploy(of_groups={**OF_GROUPS, "handover_s": 1}, of_gateways={})
    assert not processes(GROUPS) & groups
