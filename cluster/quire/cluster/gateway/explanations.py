"""Routing decisions as messages: what clients and operators see of why a request went where."""

from quire.router.decision_log import Explanation
from quire.router.errors import UnknownDecision
from quire.router.policy import Decision
from quire.router.table import RoutingTable
from quire.v1 import inference_pb2 as pb
from quire.worker.errors import InvalidRequest

MAX_LIMIT = 1000
DEFAULT_LIMIT = 20

_HTTP_PREFIXES = ("chatcmpl-", "cmpl-")
"""Of HTTP answers' ids, before the request's own."""


def explain(table: RoutingTable, request: pb.ExplainRoutingRequest) -> pb.ExplainRoutingResponse:
    """Answers `ExplainRouting`.

    Raises:
        InvalidRequest: Both a request and a number of decisions are asked for, or too many.
        UnknownDecision: The request was not routed here, or is forgotten.
    """
    if request.limit > MAX_LIMIT:
        raise InvalidRequest(f"limit={request.limit} is out of range: 1 to {MAX_LIMIT}")
    if request.limit and request.request_id:
        raise InvalidRequest(
            f"limit={request.limit} does not go with request_id: ask for one of the two"
        )
    if request.request_id:
        found = _find(table, request.request_id)
    else:
        found = table.recent(request.limit or DEFAULT_LIMIT)
    return pb.ExplainRoutingResponse(decisions=[_message(each) for each in found])


def routing_message(decision: Decision, *, with_candidates: bool) -> pb.Routing:
    message = pb.Routing(
        group=decision.group,
        reason=decision.reason,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        forecast_s=decision.forecast_s,
    )
    if with_candidates:
        message.candidates.extend(
            pb.RoutingCandidate(
                group=candidate.group,
                cost=candidate.cost,
                num_cached_tokens=candidate.num_cached_tokens,
                num_prefill_tokens=candidate.num_prefill_tokens,
                num_queued_tokens=candidate.num_queued_tokens,
                num_sequences=candidate.num_sequences,
                forecast_s=candidate.forecast_s,
            )
            for candidate in decision.candidates
        )
    return message


def _find(table: RoutingTable, name: str) -> list[Explanation]:
    try:
        return table.explain(name)
    except UnknownDecision:
        for prefix in _HTTP_PREFIXES:
            if name.startswith(prefix):
                return table.explain(name.removeprefix(prefix))
        raise


def _message(explanation: Explanation) -> pb.RoutingDecision:
    return pb.RoutingDecision(
        request_id=explanation.request_id,
        client_id=explanation.client_id,
        attempt=explanation.attempt,
        decided_at_s=explanation.decided_at_s,
        num_prompt_tokens=explanation.decision.num_prompt_tokens,
        routing=routing_message(explanation.decision, with_candidates=True),
        policy=explanation.policy,
        pressure=explanation.pressure,
        num_cached_tokens=explanation.num_cached_tokens,
        waited_s=explanation.waited_s,
        outcome=explanation.outcome,
    )
