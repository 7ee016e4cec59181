from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import (
    reflection_pb2,
    reflection_pb2_grpc,
)

pytestmark = pytest.mark.anyio


async def test_health_follows_the_groups(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="quire.v1.Inference"))
        serving = health_pb2.HealthCheckResponse.SERVING
        assert (await watch.read()).status == serving
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving
        await cluster.groups["g0"].kill()
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == not_serving
        watch.cancel()


async def test_a_draining_gateway_is_not_healthy(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        cluster.gateway.begin_drain()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_reflection_names_the_services(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
    names = {service.name for service in response.list_services_response.service}
    assert {"quire.v1.Inference", "grpc.health.v1.Health"} <= names
