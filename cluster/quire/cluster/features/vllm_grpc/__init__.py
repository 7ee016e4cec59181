"""vLLM's gRPC service, ``vllm.grpc.engine``, for gateways that are written for vLLM."""
