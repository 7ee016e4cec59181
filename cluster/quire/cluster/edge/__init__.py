"""What clients talk to: gRPC and HTTP, their limits, keys and certificates."""
