"""The policies that can be configured, by name.

Policies of other systems, for comparison, are in `quire.simulate.baselines`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from quire.router.policies.policy import Policy
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.policies.simple import LeastLoaded, PowerOfTwo, RoundRobin

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "prefix_aware": PrefixAware,
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
    }
)
