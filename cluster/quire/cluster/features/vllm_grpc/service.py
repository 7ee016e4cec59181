"""Whether `vllm.grpc.engine` is served: where the package smg-grpc-proto is installed."""

from importlib.util import find_spec

from quire.cluster.edge.grpc_calls import GrpcService
from quire.cluster.gateway.models import Models


def vllm_service(models: Models) -> GrpcService | None:
    if find_spec("smg_grpc_proto") is None:
        return None
    from quire.cluster.features.vllm_grpc.servicer import (
        VLLM_SERVICE,
        VllmEngineService,
        add_to_server,
    )

    return GrpcService(
        descriptor=VLLM_SERVICE, servicer=VllmEngineService(models), add=add_to_server
    )
