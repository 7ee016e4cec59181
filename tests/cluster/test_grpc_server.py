from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import (
    reflection_pb2,
    reflection_pb2_grpc,
)

from quire.cluster.edge.reflection import v1_file

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
        cluster.models.begin_drain()
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


async def test_reflection_v1_describes_the_services_and_itself(start_cluster: Any) -> None:
    pool = DescriptorPool()
    pool.AddSerializedFile(v1_file().SerializeToString())
    asked, answered = (
        GetMessageClass(pool.FindMessageTypeByName(f"grpc.reflection.v1.ServerReflection{name}"))
        for name in ("Request", "Response")
    )
    async with (
        start_cluster(num_groups=1) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        call: Any = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )()
        await call.write(asked(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {
            "quire.v1.Inference",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        } <= names
        for name in names:
            await call.write(asked(file_containing_symbol=name))
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            known = DescriptorPool()
            for file in reversed(files):  # Dependencies follow the file that needs them.
                known.AddSerializedFile(file)
            assert known.FindServiceByName(name).methods
        await call.write(asked(file_containing_symbol="quire.v1.Unknown"))
        assert (await call.read()).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
        await call.done_writing()
