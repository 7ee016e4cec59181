"""Blocks outside the KV cache: host memory, disk, and transfers between groups."""
