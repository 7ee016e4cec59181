"""The interfaces for clients: gRPC and HTTP, with limits, API keys and certificates."""
