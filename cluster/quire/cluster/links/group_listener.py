"""The interface to which a `GroupClient` reports its group's state."""

from typing import TYPE_CHECKING, Protocol

from quire.cluster.errors import Death
from quire.router.prefix_index.directory import Position
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.events import EventBatch

if TYPE_CHECKING:
    from quire.cluster.links.group_client import GroupClient


class GroupListener(Protocol):
    """Receives what a `GroupClient` learns. All methods are called from the event loop."""

    def check(self, description: pb.GroupDescription) -> None:
        """Raises GroupMismatch if the group must not be used."""

    def attached(self, client: "GroupClient") -> None:
        """Called when requests can be submitted to the group. Raises GroupMismatch as `check`."""

    def detached(self, client: "GroupClient") -> None:
        """Called when the group is lost, before its requests fail."""

    def died(self, death: Death) -> None:
        """Called when the group is gone, failed, silent or hangs, as far as its client can tell,
        unless it drains. Its requests fail only after this."""

    def turned_away(self, client: "GroupClient") -> None:
        """Called when the group takes no more requests, until `taken_back` or `attached`."""

    def taken_back(self, client: "GroupClient") -> bool:
        """Called when the group offers to take requests again. False refuses; it is called again
        later."""

    def has_other(self, client: "GroupClient") -> bool:
        """Whether another group with the same model card takes requests, and so can take over."""

    def load(
        self, client: "GroupClient", load: pb.Load, *, step: int, num_submits: int | None
    ) -> None:
        """Called with the group's new load after ``step`` steps. ``load`` counts the first
        ``num_submits`` of this connection's submits; ``None`` if the group does not report it."""

    def events(self, client: "GroupClient", batch: EventBatch) -> bool:
        """Takes block events. False: they have a gap, read again from `events_position`."""

    def events_position(self, client: "GroupClient") -> Position:
        """The position from which to request the group's events."""
