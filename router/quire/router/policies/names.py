"""The routing policies by name, each in a line; light, for flags and settings.

What they are is in `quire.router.policies.catalog`, by the same names.
"""

from collections.abc import Mapping
from types import MappingProxyType

POLICY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "prefix_aware": "least time to first token, for this request and those behind it",
        "round_robin": "the groups in turn",
        "least_loaded": "the least work queued and running",
        "power_of_two": "the one with fewer requests of two at random, as Ray Serve does",
    }
)
