"""Who keeps requests at a gateway until the groups have room for them.

The cluster's admission is above the router and cannot be imported here: whoever simulates hands
it in, as `bench.serving.admitted` does.
"""

from typing import Protocol

from quire.router.simulate.group import Group


class Gate(Protocol):
    """Of one gateway."""

    def offer(self, request_id: int) -> bool:
        """Takes in a new request; whether it may go to a group at once."""

    def routed(self, request_id: int) -> None:
        """It went, and the routing table counts it."""

    def frame(self, index: int, group: Group) -> None:
        """A step of the group has ended, and the next one has begun."""

    def release(self) -> list[int]:
        """Those that may go now."""

    def started(self, request_id: int) -> None:
        """Its first token came."""

    def finished(self, request_id: int) -> None:
        """Its last token came."""
