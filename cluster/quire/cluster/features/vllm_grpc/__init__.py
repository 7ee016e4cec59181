"""vLLM's gRPC service, ``vllm.grpc.engine``, for gateways that are written for vLLM.

`service` decides whether it is served, `servicer` answers its calls, `format` converts messages.
"""
