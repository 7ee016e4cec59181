"""Limits on connections over HTTP and gRPC: their number, age, silence and slowness."""
