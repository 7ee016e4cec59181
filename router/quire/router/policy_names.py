"""The routing policies by name, each in a line; light, for flags and settings.

What they are is in `quire.router.policies.catalog`, by the same names.
"""

from collections.abc import Mapping
from types import MappingProxyType

POLICY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "prefix_aware": "least time to first token, for this request and those behind it",
        "round_robin": "the groups in turn",
        "random": "any group",
        "least_loaded": "the least work queued and running",
        "power_of_two": "the one with fewer requests of two at random, as Ray Serve does",
        "bounded_hash": "consistent hashing of the first block, with bounded loads",
        "sglang": "SGLang's cache-aware routing, by what was routed where",
        "sglang_events": "the same, by the groups' events",
        "ray_prefix": "Ray Serve's prefix affinity",
        "llmd": "llm-d's scorers",
        "preble": "Preble's",
        "mooncake": "Mooncake's",
        "dynamo": "Dynamo's cost function, with its default weights",
        "dynamo_20": "the same, with overlap weighted 20 times",
    }
)
