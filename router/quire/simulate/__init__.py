"""Replays request traces against simulated groups, with the router's real decisions.

The only part of the router that may import the worker's block pool and eviction policies, and
nothing else in the router imports it (docs/decisions/0014-simulator.md).
"""
