"""Builds a call's spans from its `Timeline` when it has ended: the gateway's part of a trace.

    chat MODEL      the call, as a server span; its parent is the client's span
      prepare       chat template and tokenizer
      queue         admission
      attempt       one for each group that it was sent to; the group's own span is below it

Names follow OpenTelemetry's conventions (HTTP, RPC, GenAI), vLLM's for latencies
(``gen_ai.latency.*``), and are ``quire.*`` where those have no name.
"""

from http import HTTPStatus

from quire.cluster.features.tracing.tracing import Span, Value, ids_in, new_span_id
from quire.cluster.telemetry.timeline import Attempt, CompletionRecord, Timeline

_LOSSES = ("", "GroupLost", "GroupDied")
"""Errors whose text is Quire's own. Other texts may quote a client's data."""
_SERVER_ERRORS = (
    *("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
)
"""gRPC statuses that the conventions list as server errors."""


def spans_of(call: Timeline) -> list[Span]:
    """The spans of ``call``; none if it is not sampled."""
    if not call.is_sampled or call.ended_s is None:
        return []
    spans = [_own(call)]
    if call.prepared_s is not None:
        spans.append(_part(call, "prepare", call.arrival_s, call.prepared_s))
        admitted_s = call.ended_s if call.admitted_s is None else call.admitted_s
        spans.append(_part(call, "queue", call.prepared_s, admitted_s))
    for completion in call.completions:
        for number, attempt in enumerate(completion.attempts, 1):
            if attempt.traceparent:
                spans.append(_of_attempt(call, completion, attempt, number))
    return spans


def _own(call: Timeline) -> Span:
    assert call.ended_s is not None
    is_grpc = call.method == "gRPC"
    is_failure = call.status in _SERVER_ERRORS if is_grpc else call.status.startswith("5")
    name = call.endpoint.lstrip("/") if is_grpc else f"{call.method} {call.endpoint}"
    attributes = _of_transport(call)
    if call.model:
        name = f"{_operation(call)} {call.model}"
        attributes |= _of_model(call)
    return Span(
        name=name,
        kind="server",
        trace_id=call.trace_id,
        span_id=call.span_id,
        parent_span_id=call.parent_span_id,
        trace_state=call.trace_state,
        begin_s=call.arrived_at,
        end_s=call.wall_s(call.ended_s),
        attributes=attributes,
        error=(call.error or call.status) if is_failure else "",
    )


def _of_transport(call: Timeline) -> dict[str, Value]:
    told: dict[str, Value] = {}
    if call.method == "gRPC":
        told["rpc.system.name"] = "grpc"
        told["rpc.method"] = call.endpoint.lstrip("/")
        told["rpc.response.status_code"] = call.status
        is_error = call.status != "OK"
    else:
        told["http.request.method"] = call.method
        told["http.route"] = call.endpoint
        told["http.response.status_code"] = int(call.status)
        is_error = int(call.status) >= HTTPStatus.BAD_REQUEST
    if is_error:
        told["error.type"] = call.error or call.status
    if call.server is not None:
        told["server.address"], told["server.port"] = call.server
    if call.tenant:
        told["quire.tenant"] = call.tenant
    return told


def _of_model(call: Timeline) -> dict[str, Value]:
    assert call.ended_s is not None
    told: dict[str, Value] = {
        "gen_ai.operation.name": _operation(call),
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": call.model,
        "gen_ai.request.stream": call.is_stream,
        "gen_ai.response.id": call.request_id,
        "gen_ai.response.model": call.model,
        "gen_ai.usage.input_tokens": call.num_prompt_tokens,
        "gen_ai.usage.output_tokens": call.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.num_cached_tokens,
        "gen_ai.latency.e2e": call.ended_s - call.arrival_s,
    }
    sampling = call.sampling
    if sampling is not None and call.operation == "generate":
        told["gen_ai.request.max_tokens"] = sampling.max_tokens or 0
        told["gen_ai.request.temperature"] = float(sampling.temperature)
        told["gen_ai.request.top_p"] = float(sampling.top_p)
        if sampling.n > 1:
            told["gen_ai.request.choice.count"] = sampling.n
    reasons = [each.outcome for each in call.completions if each.outcome]
    if reasons:
        told["gen_ai.response.finish_reasons"] = reasons
    if call.queue_s is not None:
        told["gen_ai.latency.time_in_queue"] = call.queue_s
    first_s = call.first_token_s
    if first_s is not None:
        told["gen_ai.latency.time_to_first_token"] = first_s - call.arrival_s
    return told


def _operation(call: Timeline) -> str:
    """The operation's name in the conventions."""
    if call.operation == "embed":
        return "embeddings"
    return "chat" if call.is_chat else "text_completion"


def _part(call: Timeline, name: str, begin_s: float, end_s: float) -> Span:
    return Span(
        name=name,
        trace_id=call.trace_id,
        span_id=new_span_id(),
        parent_span_id=call.span_id,
        trace_state=call.trace_state,
        begin_s=call.wall_s(begin_s),
        end_s=call.wall_s(end_s),
    )


def _of_attempt(
    call: Timeline, completion: CompletionRecord, attempt: Attempt, number: int
) -> Span:
    """``number``: the attempt's index among those of its completion."""
    assert call.ended_s is not None
    end_s = call.ended_s if attempt.ended_s is None else attempt.ended_s
    later = completion.attempts[number:]
    num_tokens = later[0].num_resumed_tokens if later else completion.num_output_tokens
    told: dict[str, Value] = {
        "quire.group": attempt.group,
        "quire.completion": completion.index,
        "quire.attempt": number,
        "quire.routing.reason": attempt.reason,
        "quire.tokens.output": num_tokens - attempt.num_resumed_tokens,
        "quire.tokens.cached": attempt.num_cached_tokens,
    }
    if attempt.num_resumed_tokens:
        told["quire.tokens.resumed"] = attempt.num_resumed_tokens
    if attempt.num_fetched_tokens:
        told["quire.tokens.fetched"] = attempt.num_fetched_tokens
    if attempt.error_type in _LOSSES:
        told["quire.outcome"] = attempt.outcome
    if attempt.error_type:
        told["error.type"] = attempt.error_type
    if attempt.forecast_s is not None:
        told["quire.first_token.forecast_s"] = attempt.forecast_s
    if attempt.begun_s is not None:
        told["quire.first_token.s"] = attempt.begun_s - attempt.routed_s
    _, span_id = ids_in(attempt.traceparent)
    return Span(
        name="attempt",
        kind="client",
        trace_id=call.trace_id,
        span_id=span_id,
        parent_span_id=call.span_id,
        trace_state=call.trace_state,
        begin_s=call.wall_s(attempt.routed_s),
        end_s=call.wall_s(end_s),
        attributes=told,
        error=attempt.outcome if attempt.error_type in _LOSSES[1:] else attempt.error_type,
    )
