"""Decides which attached groups lend blocks to each other, and tells how to reach them."""

from collections.abc import Mapping

from quire.cluster.links.group_client import GroupClient
from quire.cluster.links.group_link import GroupContact
from quire.router.prefix_index.directory import GroupId
from quire.v1 import group_pb2 as pb


class Exchange:
    """A view of a gateway's state of its groups: the mappings may change.

    ``contacts``: each group's token and certificate by address. ``loads``: each group's last load.
    """

    def __init__(
        self,
        attached: Mapping[GroupId, GroupClient],
        loads: Mapping[GroupId, pb.Load],
        contacts: Mapping[str, GroupContact],
    ) -> None:
        self._attached = attached
        self._loads = loads
        self._contacts = contacts

    def source(self, source: GroupId, *, taker: GroupId, num_blocks: int) -> pb.BlockSource | None:
        """How ``taker`` reaches ``source``, which has ``num_blocks`` blocks of a request; ``None``
        if the two do not exchange blocks, or one of them is no longer attached."""
        both = [self._attached.get(group_id) for group_id in (source, taker)]
        lender, borrower = both
        if lender is None or borrower is None or not num_blocks:
            return None
        if not _exchange(lender.description, borrower.description):
            return None
        contact = self._contacts.get(lender.address) or GroupContact(address=lender.address)
        return pb.BlockSource(group_id=source, num_blocks=num_blocks, **contact.metadata())

    def members(self) -> list[GroupId]:
        """The groups that exchange blocks, including draining ones."""
        attached = list(self._attached.items())
        able = [client for _, client in attached if client.description.HasField("kv_format")]
        return [
            group_id
            for group_id, client in attached
            if able and _exchange(client.description, able[0].description)
        ]

    def fullest(self, taker: GroupId, *, limit: int) -> list[pb.BlockSource]:
        """Up to ``limit`` groups that have blocks which ``taker`` can fetch, those with most
        first."""
        held = {
            group_id: load.num_cached_blocks + load.num_held_blocks
            for group_id, load in self._loads.items()
            if group_id != taker
        }
        found = [
            self.source(group_id, taker=taker, num_blocks=held[group_id])
            for group_id in sorted(held, key=lambda group_id: -held[group_id])
        ]
        return [source for source in found if source is not None][:limit]


def _exchange(one: pb.GroupDescription, other: pb.GroupDescription) -> bool:
    """Whether the two groups lend blocks to each other."""
    return one.HasField("kv_format") and one.kv_format == other.kv_format
