"""gRPC server reflection, in v1, which clients try first, and in v1alpha.

grpcio-reflection has only v1alpha. v1 has the same messages in another package, so their bytes are
equal, and one servicer answers both.
"""

from collections.abc import Iterable

import grpc
import grpc.aio
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(files: Iterable[FileDescriptor], server: grpc.aio.Server) -> None:
    """Lets clients of ``server`` look up the services in ``files`` and reflection's own."""
    files = [*files, reflection_pb2.DESCRIPTOR]
    names = [service.full_name for file in files for service in file.services_by_name.values()]
    # A separate pool: the default one must stay free for another package's v1.
    pool = DescriptorPool()
    seen: set[str] = set()
    for file in files:
        _add(file, pool, seen)
    pool.AddSerializedFile(v1_file().SerializeToString())
    servicer = reflection.aio.ReflectionServicer((*names, V1), pool=pool)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    v1 = grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((v1,))


def v1_file() -> FileDescriptorProto:
    """The file descriptor of v1, derived from v1alpha's."""
    described = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    described.options.ClearField("deprecated")
    text = text_format.MessageToString(described)
    return text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())


def _add(file: FileDescriptor, pool: DescriptorPool, seen: set[str]) -> None:
    if file.name not in seen:
        seen.add(file.name)
        for dependency in file.dependencies:
            _add(dependency, pool, seen)
        pool.AddSerializedFile(file.serialized_pb)
