"""The KV cache: its block pool, eviction, tiers of slower memory, and transfers of blocks."""
