"""Reports a gateway's requests that wait for a group to a replica group, for autoscaling."""

import asyncio
import contextlib
import logging
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from quire.cluster.features.autoscale.demand import Demand
from quire.cluster.supervise import end_if_cancelled

_log = logging.getLogger(__name__)

_DEMAND_REPORT_S = 0.5


async def report_demand(demand: Demand, groups: "DeploymentHandle[Any]") -> None:
    """Reports ``demand`` to one of ``groups`` repeatedly while requests wait."""
    note = groups.options(method_name="note_demand")
    name = serve.get_replica_context().replica_id.unique_id
    was_told = True
    while True:
        await demand.wait_for_some()
        try:
            await _tell(note, name, demand)
            was_told = True
        # Ray raises many kinds of error, some while Serve replaces groups; the next try may work.
        except Exception as error:
            end_if_cancelled()
            if was_told:
                _log.warning("demand cannot be told: %r", error)
            was_told = False
        await asyncio.sleep(_DEMAND_REPORT_S)


async def _tell(note: "DeploymentHandle[Any]", gateway: str, demand: Demand) -> None:
    call = cast("DeploymentResponse[None]", note.remote(gateway, demand.num_tokens))
    answer = asyncio.ensure_future(_answer(call))
    try:
        # The call may wait for a group, which is no longer needed when no request waits.
        await demand.wait_while_some(until=answer)
    finally:
        if not answer.done():
            # This raises the call's error, which `_answer` logs.
            with contextlib.suppress(Exception):
                call.cancel()
    await asyncio.wait([answer])


async def _answer(call: DeploymentResponse[None]) -> None:
    try:
        await call
    except Exception as error:  # Ray raises many kinds: a group died, or the call was cancelled.
        _log.debug("demand was not heard: %r", error)
