"""The layer that records how a completion ended, for metrics, logs and explanations."""

import asyncio
import logging
from math import inf

from quire.cluster.gateway.work import Completion, Parts, Run, Take, Work
from quire.worker.request.errors import InvalidRequest, QueueFull, QuireError

_log = logging.getLogger(__name__)

# A client ends its call at the deadline too, and often first: gRPC sends the remaining time rounded
# up, by a hundredth at most, and the message takes some milliseconds to arrive.
_ROUNDING = 0.01
_ON_THE_WAY_S = 0.02


class Record:
    """Records the outcome: a finish reason, "cancelled", "deadline" or "error"."""

    def __init__(self, parts: Parts) -> None:
        self._table = parts.table
        self._clock = parts.clock

    async def __call__(self, one: Completion, take: Take, run: Run[Completion]) -> None:
        outcome, detail = "error", ""
        try:
            await run(one, take)
            assert one.output.finish_reason is not None
            outcome = one.output.finish_reason
        except asyncio.CancelledError:
            lost = None if one.is_sent else one.error
            outcome, detail = why_cancelled(one.work, now_s=self._clock(), lost=lost)
            raise
        except QuireError as error:
            detail = str(error)
            if not isinstance(error, InvalidRequest | QueueFull):
                name, known_as = one.request.request_id, one.request.client_id or "no name"
                num_tokens = len(one.output.token_ids)
                _log.warning("%s (%s) fails after %d tokens: %s", name, known_as, num_tokens, error)
            raise
        finally:
            if outcome == "error":
                one.work.is_failed = True
            told = f"{outcome}: {detail}" if detail else outcome
            self._table.completed(one.request.request_id, outcome=told)
            one.record.end(outcome, num_output_tokens=len(one.output.token_ids))


def why_cancelled(work: Work, *, now_s: float, lost: QuireError | None) -> tuple[str, str]:
    """The outcome of a completion that is cancelled now, and a detail, which may be empty.

    A completion is cancelled by its client, by its deadline, or because another completion of the
    same request failed. It sees the same CancelledError in all three cases. ``lost`` is the error
    of its last attempt, if it waits for the next one.
    """
    waiting = f"while it waited for another group ({lost})" if lost else ""
    if work.is_failed:
        return "cancelled", "another completion of the request failed"
    if now_s >= _late_s(work):
        return "deadline", f"passed {waiting or 'before the end'}"
    return "cancelled", waiting


def _late_s(work: Work) -> float:
    arrival_s, deadline_s = work.first.arrival_s, work.first.deadline_s
    if deadline_s == inf:
        return inf
    return deadline_s - _ROUNDING * (deadline_s - arrival_s) - _ON_THE_WAY_S
