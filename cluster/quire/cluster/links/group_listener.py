"""The listener to which a `GroupClient` reports its group's state."""

from typing import TYPE_CHECKING, Protocol

from quire.cluster.errors import Death
from quire.router.prefix_index.directory import Position
from quire.v1 import group_pb2 as pb
from quire.worker.api.events import EventBatch

if TYPE_CHECKING:
    from quire.cluster.links.group_client import GroupClient


class GroupListener(Protocol):
    """Called from the event loop."""

    def check(self, description: pb.GroupDescription) -> None:
        """Raises GroupMismatch where this group must not be used."""

    def attached(self, client: "GroupClient") -> None:
        """The group is attached: requests can be submitted. Raises GroupMismatch as `check`."""

    def detached(self, client: "GroupClient") -> None:
        """The group is detached. Requests under way are told only after this."""

    def died(self, death: Death) -> None:
        """The group is gone, failed, silent or hangs, as far as one can tell, and did not drain.
        Those under way are told only after this."""

    def turned_away(self, client: "GroupClient") -> None:
        """The group takes no more requests until `taken_back`, or until it is attached again."""

    def taken_back(self, client: "GroupClient") -> bool:
        """The group would take requests again. False: it gets none; ask again later."""

    def has_other(self, client: "GroupClient") -> bool:
        """Whether another group of its kind takes requests, so that this one's can go on there."""

    def load(
        self, client: "GroupClient", load: pb.Load, *, step: int, num_submits: int | None
    ) -> None:
        """The group has stepped since the last call; ``load`` counts the first ``num_submits`` of
        this connection's submits, where the group says it."""

    def events(self, client: "GroupClient", batch: EventBatch) -> bool:
        """Takes events in. False: they do not follow on, begin again at `events_position`."""

    def events_position(self, client: "GroupClient") -> Position:
        """From where on to ask the group for events."""
