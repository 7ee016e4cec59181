"""Every policy by the name under which it is configured."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from quire.router.policies.known import (
    DynamoCost,
    LlmdScorers,
    Mooncake,
    Preble,
    RayPrefixAffinity,
    SglangCacheAware,
)
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.policies.simple import (
    AnyGroup,
    BoundedHash,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
)
from quire.router.policy import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "prefix_aware": PrefixAware,
        "round_robin": RoundRobin,
        "random": AnyGroup,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
        "bounded_hash": BoundedHash,
        "sglang": partial(SglangCacheAware, approximate=True),
        "sglang_events": partial(SglangCacheAware, approximate=False),
        "ray_prefix": RayPrefixAffinity,
        "llmd": LlmdScorers,
        "preble": Preble,
        "mooncake": Mooncake,
        "dynamo": partial(DynamoCost, weight=1.0),
        "dynamo_20": partial(DynamoCost, weight=20.0),
    }
)
