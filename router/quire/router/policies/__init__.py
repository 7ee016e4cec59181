"""Routing policies: the prefix-aware default, and three that are unaware of caches."""
