"""Routing policies: ours, and three that know nothing of caches."""
