"""Blocks of KV cache and which of them make room for others."""
