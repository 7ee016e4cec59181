"""Routing decisions as messages that explain to clients and operators where a request was sent."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from quire.router.decision_log import Explanation
from quire.router.errors import UnknownDecision
from quire.router.policies.policy import Candidate, Decision
from quire.router.table import RoutingTable
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import InvalidRequest

MAX_LIMIT = 1000
DEFAULT_LIMIT = 20
_MAX_ASKING = 4
"""Most queries at a time: each asks every gateway."""

_HTTP_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes of ids in HTTP answers, in front of the request's own id."""


Answers = tuple[Sequence[pb.ExplainRoutingResponse], str]
"""The other gateways' answers, and the names of those that did not answer; "" if all did."""
AskOthers = Callable[[pb.ExplainRoutingRequest, str | None], Awaitable[Answers]]


class Explanations:
    """Answers `ExplainRouting` for all gateways: behind one address, a client cannot tell which of
    them routed its request. ``tenant``: the tenant whose requests are explained; ``None`` means
    all."""

    def __init__(self, tables: Callable[[], Sequence[RoutingTable]]) -> None:
        """``tables``: the present routing tables: one per model, more while a model is being
        replaced."""
        self.ask_others: AskOthers = _no_others
        """Set by the code that knows other gateways. It must limit its own time and raise
        nothing."""
        self._tables = tables
        self._asking = asyncio.Semaphore(_MAX_ASKING)

    async def answer(
        self, request: pb.ExplainRoutingRequest, *, tenant: str | None
    ) -> pb.ExplainRoutingResponse:
        """The answers of this and all other gateways, merged.

        Raises:
            InvalidRequest: Both a request and a number of decisions are given, or the number is too
                large.
            UnknownDecision: No gateway routed the request, or all have forgotten it.
        """
        _check(request)
        async with self._asking:
            own, (others, incomplete) = await asyncio.gather(
                self.own(request, tenant=tenant), self.ask_others(request, tenant)
            )
        if others:
            await asyncio.to_thread(_merge, own, others, request)
        if request.request_id and not own.decisions:
            name = _names(request.request_id)[-1]
            raise UnknownDecision(name, incomplete=incomplete)
        own.incomplete = incomplete
        return own

    async def own(
        self, request: pb.ExplainRoutingRequest, *, tenant: str | None
    ) -> pb.ExplainRoutingResponse:
        """This gateway's own answer, which may be empty."""
        # In a thread: thousands of candidates take a second, which would stall all streams.
        return await asyncio.to_thread(_explain, self._tables(), request, tenant)


async def _no_others(request: pb.ExplainRoutingRequest, tenant: str | None) -> Answers:
    return (), ""


def routing_message(decision: Decision, *, with_candidates: bool, with_loads: bool) -> pb.Routing:
    """The decision as a message. ``with_loads``: with the groups' loads and all that follows from
    them, which is for operators only: beside a single request of another tenant, they reveal its
    length."""
    message = pb.Routing(
        group=decision.group,
        reason=decision.reason,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        forecast_s=decision.forecast_s if with_loads else None,
        num_fetched_tokens=decision.num_fetched_tokens,
        source=decision.source or "",
        fetch_s=decision.fetch_s if with_loads else None,
    )
    if with_candidates:
        message.candidates.extend(
            _candidate(candidate, with_loads=with_loads) for candidate in decision.candidates
        )
    return message


def _candidate(candidate: Candidate, *, with_loads: bool) -> pb.RoutingCandidate:
    message = pb.RoutingCandidate(
        group=candidate.group,
        num_cached_tokens=candidate.num_cached_tokens,
        num_prefill_tokens=candidate.num_prefill_tokens,
        num_fetched_tokens=candidate.num_fetched_tokens,
    )
    if with_loads:
        message.MergeFrom(
            pb.RoutingCandidate(
                cost=candidate.cost,
                num_queued_tokens=candidate.num_queued_tokens,
                num_sequences=candidate.num_sequences,
                forecast_s=candidate.forecast_s,
                adapter_cost=candidate.adapter_cost,
            )
        )
    return message


def _check(request: pb.ExplainRoutingRequest) -> None:
    if request.limit > MAX_LIMIT:
        raise InvalidRequest(
            f"limit={request.limit} is out of range: 1 to {MAX_LIMIT}", param="limit"
        )
    if request.limit and request.request_id:
        raise InvalidRequest(
            f"limit={request.limit} does not go with request_id: ask for one of the two",
            param="limit",
        )


def _explain(
    tables: Sequence[RoutingTable], request: pb.ExplainRoutingRequest, tenant: str | None
) -> pb.ExplainRoutingResponse:
    name, limit = request.request_id, request.limit or DEFAULT_LIMIT
    found: list[Explanation] = []
    for each in tables:
        found += _find(each, name, tenant) if name else each.recent(limit, tenant=tenant)
    with_loads = tenant is None
    answer = pb.ExplainRoutingResponse(
        decisions=[_message(each, with_loads=with_loads) for each in found]
    )
    if len(tables) > 1:
        _merge(answer, (), request)
    return answer


def _find(table: RoutingTable, name: str, tenant: str | None) -> list[Explanation]:
    for each in _names(name):
        with contextlib.suppress(UnknownDecision):
            return table.explain(each, tenant=tenant)
    return []


def _names(name: str) -> list[str]:
    """The request ids that ``name`` may mean."""
    return [name, *(name.removeprefix(each) for each in _HTTP_PREFIXES if name.startswith(each))]


def _merge(
    answer: pb.ExplainRoutingResponse,
    others: Sequence[pb.ExplainRoutingResponse],
    request: pb.ExplainRoutingRequest,
) -> None:
    """Merges ``others`` into ``answer``, ordered by the gateways' clocks."""
    decisions = [each for said in (answer, *others) for each in said.decisions]
    is_of_one = bool(request.request_id)
    decisions.sort(key=lambda each: each.decided_at_s, reverse=not is_of_one)
    if not is_of_one:
        del decisions[request.limit or DEFAULT_LIMIT :]
    merged = pb.ExplainRoutingResponse(decisions=decisions)
    answer.CopyFrom(merged)


def _message(explanation: Explanation, *, with_loads: bool) -> pb.RoutingDecision:
    fetched = explanation.fetched
    return pb.RoutingDecision(
        request_id=explanation.request_id,
        client_id=explanation.client_id,
        tenant=explanation.tenant,
        attempt=explanation.attempt,
        decided_at_s=explanation.decided_at_s,
        num_prompt_tokens=explanation.decision.num_prompt_tokens,
        routing=routing_message(explanation.decision, with_candidates=True, with_loads=with_loads),
        policy=explanation.policy,
        pressure=explanation.pressure if with_loads else None,
        num_cached_tokens=explanation.num_cached_tokens,
        waited_s=explanation.waited_s,
        outcome=explanation.outcome,
        fetched=fetched and pb.RoutingFetched(**fetched._asdict()),
    )
