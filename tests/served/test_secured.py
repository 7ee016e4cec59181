"""An upgrade turns on API keys and TLS in a real cluster of two gateways."""

import os
import signal
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from ray import serve
from ray.serve.context import _get_global_client
from tests.cluster.test_security import Certificates
from tests.served.conftest import APP_NAME, CONFIG, GROUPS_NAME, marked_processes
from tests.served.paced_group import ReplicaGroup, set_pace

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import running_app, upgrade_app
from quire.cluster.deploy.local import ray_session
from quire.cluster.tools.generate import generate
from quire.v1 import group_pb2, group_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KEY = (("authorization", "Bearer acme-1"),)
NUM_TOKENS = 100


@dataclass
class Upgraded:
    certificates: Certificates
    addresses: list[str]
    """Addresses of the gateways' gRPC servers."""
    alone: list[int]
    """Tokens of a prompt before the upgrade."""
    across: list[int]
    """Tokens of the same prompt during the upgrade, which replaced everything."""
    logs: Path

    def channel(self, gateway: int) -> grpc.Channel:
        root = self.certificates.authority.cert_pem.bytes()
        return grpc.secure_channel(self.addresses[gateway], grpc.ssl_channel_credentials(root))


@pytest.fixture(scope="module")
def cluster(pace_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    folder = tmp_path_factory.mktemp("secrets")
    certificates = Certificates(folder)
    keys = folder / "keys"
    keys.write_text("acme-1 acme\nother-1 other\n")
    before = replace(
        CONFIG,
        engine=replace(CONFIG.engine, tensor_parallel_size=1),
        num_gateways=2,
        drain_timeout_s=120,
        handover_s=118,  # The old gateway moves its stream to a new group.
        max_queue_wait_s=1000,
    )
    after = replace(
        before,
        api_keys_file=keys,
        tls_certificate=certificates.certificate,
        tls_key=certificates.key,
    )
    with (
        marked_processes(),
        ray_session() as session,
        running_app(before, name=APP_NAME, group=ReplicaGroup) as endpoints,
        grpc.insecure_channel(endpoints.grpc) as channel,
    ):
        alone = tokens(channel)
        across = upgrade_under(channel, after, lambda pace_s: set_pace(pace_file, pace_s))
        gateways = serve.get_deployment_handle("Gateway", app_name=APP_NAME)
        addresses = sorted(address for address, _ in gateways.broadcast("addresses").results())
        assert session.logs is not None
        yield Upgraded(certificates, addresses, alone, across, session.logs.parent)


def upgrade_under(
    channel: grpc.Channel, config: ClusterConfig, pace: Callable[[float], None]
) -> list[int]:
    """Tokens of a stream that begins before the upgrade and ends after it."""
    pace(0.3)
    stream = generate(channel, request())
    token_ids = list(next(stream).token_ids)
    upgrade_app(config, name=APP_NAME, group=ReplicaGroup)
    pace(0)
    return token_ids + [token for chunk in stream for token in chunk.token_ids]


def request() -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(text="A whale is", sampling=sampling)


def tokens(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> list[int]:
    chunks = generate(channel, request(), metadata=metadata)
    return [token for chunk in chunks for token in chunk.token_ids]


def test_a_stream_goes_on_while_keys_and_tls_are_turned_on(cluster: Upgraded) -> None:
    assert len(cluster.alone) == NUM_TOKENS
    assert cluster.across == cluster.alone


def test_behind_it_all_doors_are_shut(cluster: Upgraded) -> None:
    for gateway in (0, 1):
        with cluster.channel(gateway) as channel:
            assert tokens(channel, KEY) == cluster.alone
            with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                tokens(channel)
        with (
            grpc.insecure_channel(cluster.addresses[gateway]) as channel,
            pytest.raises(grpc.RpcError, match="UNAVAILABLE"),
        ):
            tokens(channel, KEY)
    groups = serve.get_deployment_handle("ReplicaGroup", app_name=GROUPS_NAME)
    told = groups.broadcast("record_replica_metadata").results()
    assert len(told) == 2
    for said in told:
        root = grpc.ssl_channel_credentials(said["certificate"].encode())
        options = [("grpc.ssl_target_name_override", "group.quire")]
        with grpc.secure_channel(said["address"], root, options) as channel:
            stub = group_pb2_grpc.ReplicaGroupStub(channel)
            for metadata in ((), KEY):
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    stub.Describe(group_pb2.DescribeRequest(), metadata=metadata)


def test_what_ray_logs_and_serve_shows_has_no_secret(cluster: Upgraded) -> None:
    groups = serve.get_deployment_handle("ReplicaGroup", app_name=GROUPS_NAME)
    client = _get_global_client()
    assert client is not None
    shown = repr(serve.status()) + repr(client.get_serve_details())
    logs = [path for path in cluster.logs.rglob("*") if path.is_file()]
    assert len(logs) > 5
    for path in logs:
        shown += path.read_text(errors="replace")
    for said in groups.broadcast("record_replica_metadata").results():
        assert said["address"] in shown, "groups say in their logs where they are"
        assert said["token"] not in shown
    assert "acme-1" not in shown


def test_every_gateway_explains_what_any_of_them_routed(cluster: Upgraded) -> None:
    with cluster.channel(0) as first, cluster.channel(1) as second:
        starts = [
            next(iter(generate(channel, request(), metadata=KEY))).start
            for channel in (first, second)
        ]
        for channel in (first, second):
            stub = InferenceStub(channel)
            for start in starts:
                question = pb.ExplainRoutingRequest(request_id=start.request_id)
                (found,) = stub.ExplainRouting(question, metadata=KEY).decisions
                assert found.routing.group == start.routing.group
                other = (("authorization", "Bearer other-1"),)
                with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                    stub.ExplainRouting(question, metadata=other)
            listed = stub.ExplainRouting(pb.ExplainRoutingRequest(limit=2), metadata=KEY)
            assert [each.request_id for each in listed.decisions] == [
                start.request_id for start in reversed(starts)
            ]
            assert not listed.incomplete


def test_every_gateway_tells_what_any_of_them_served(cluster: Upgraded) -> None:
    for number in (0, 1):
        with cluster.channel(number) as channel:
            list(generate(channel, request(), metadata=KEY))
    trust = ssl.create_default_context(
        cadata=cluster.certificates.authority.cert_pem.bytes().decode()
    )
    gateways = serve.get_deployment_handle("Gateway", app_name=APP_NAME)
    answers = [
        httpx.get(f"https://{http}/v1/usage", headers=dict(KEY), verify=trust, timeout=120).json()
        for _, http in gateways.broadcast("addresses").results()
    ]
    assert len(answers) == 2
    assert answers[0]["data"] == answers[1]["data"]
    (row,) = answers[0]["data"]
    assert row["tenant"] == "acme"
    assert row["requests"] >= 2
    assert "incomplete" not in answers[0]


def test_a_gateway_that_hangs_is_told_of_and_not_waited_for(cluster: Upgraded) -> None:
    hanging = process_listening_on(int(cluster.addresses[1].rpartition(":")[2]))
    os.kill(hanging, signal.SIGSTOP)
    try:
        with cluster.channel(0) as channel:
            stub = InferenceStub(channel)
            start = next(iter(generate(channel, request(), metadata=KEY))).start
            answer = stub.ExplainRouting(pb.ExplainRoutingRequest(limit=1), metadata=KEY)
    finally:
        os.kill(hanging, signal.SIGCONT)
    assert [each.request_id for each in answer.decisions] == [start.request_id]
    assert "did not answer" in answer.incomplete


def process_listening_on(port: int) -> int:
    found = psutil.net_connections("tcp")
    (process_id,) = {
        each.pid
        for each in found
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    assert process_id is not None
    process = psutil.Process(process_id)
    # The gateway's watcher, a child process, shares the sockets.
    return (
        process.ppid()
        if "quire.cluster.features.watcher.watcher" in process.cmdline()
        else process_id
    )
