"""The wire: protobuf messages and gRPC stubs, written from ``.proto`` files by ``make stubs``."""
