"""A gateway's side of a group's block events; `quire.cluster.group.event_feed` is the group's.

Without events routing is worse but works, so no trouble with them ever ends more than a reading.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc.aio

from quire.cluster.links.group_link import GroupLink
from quire.cluster.links.group_listener import GroupListener
from quire.cluster.wire import events_from_proto
from quire.v1 import group_pb2 as pb

if TYPE_CHECKING:
    from quire.cluster.links.group_client import GroupClient

_log = logging.getLogger(__name__)

_PAUSE_S = 0.1
_PAUSE_AFTER_SURPRISE_S = 5.0  # It may be so each time.


async def read_events(link: GroupLink, client: "GroupClient", listener: GroupListener) -> None:
    """Feeds ``listener``, from where it left off, until it is cancelled.

    A stream that breaks, is odd, or does not follow on is begun again.
    """
    while True:
        position = listener.events_position(client)
        request = pb.EventsRequest(
            epoch=position.epoch, next_seq=position.next_seq, buckets=position.drifted
        )
        pause_s = _PAUSE_S
        try:
            async for message in link.Events(request):
                if not listener.events(client, events_from_proto(message)):
                    break
        except (grpc.aio.AioRpcError, ValueError):
            pass
        except Exception:
            _log.exception("the block events of the group at %s", client.address)
            pause_s = _PAUSE_AFTER_SURPRISE_S
        await asyncio.sleep(pause_s)
