"""Reads a group's block events for a gateway; `quire.cluster.group.event_feed` sends them.

Routing works without events, only worse, so an error ends at most one read. Each request for events
costs time in the group's engine thread, so a group that keeps failing is asked less often.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc.aio

from quire.cluster.links.group_link import GroupLink
from quire.cluster.links.group_listener import GroupListener
from quire.cluster.supervise import end_if_cancelled
from quire.cluster.wire import events_from_proto
from quire.router.failure_log import FailureLog
from quire.v1 import group_pb2 as pb

if TYPE_CHECKING:
    from quire.cluster.links.group_client import GroupClient

_log = logging.getLogger(__name__)

_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_MAX_PAUSE_AFTER_PROGRESS_S = 0.5
"""Limit of the pause while events still advance the directory, which is then soon exact again.
Otherwise the pause before the next request doubles until a digest agrees with the directory; else a
digest that never agrees would make the engine send its blocks ten times a second."""


async def read_events(link: GroupLink, client: "GroupClient", listener: GroupListener) -> None:
    """Passes the group's events to ``listener``, from its last position, until cancelled.

    A stream that breaks, is malformed, or has a gap is started again.
    """
    failures, doing = FailureLog(_log), f"reading the block events of the group at {client.address}"
    pause_s = _PAUSE_S
    last = None
    while True:
        try:
            position = listener.events_position(client)
            if position != last:
                pause_s = min(pause_s, _MAX_PAUSE_AFTER_PROGRESS_S)
                last = position
            request = pb.EventsRequest(
                epoch=position.epoch, next_seq=position.next_seq, buckets=position.drifted
            )
            async for message in link.Events(request):
                batch = events_from_proto(message)
                if not listener.events(client, batch):
                    break
                if batch.digest is not None:
                    pause_s = _PAUSE_S
        except Exception as error:
            is_unforeseen = not isinstance(error, (grpc.aio.AioRpcError, ValueError))
            failures.report(error, doing, with_stack=is_unforeseen)
            end_if_cancelled()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
