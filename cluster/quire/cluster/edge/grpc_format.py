"""A completion's chunks as messages of `quire.v1.Inference`."""

from quire.cluster.features.explain.explanations import routing_message
from quire.cluster.gateway.chunk import Chunk, Start, Usage
from quire.cluster.wire import FINISH_REASONS, logprobs_to_proto
from quire.v1 import inference_pb2 as pb


def response_of(chunk: Chunk, *, with_loads: bool) -> pb.GenerateResponse:
    """``with_loads``: see `routing_message`."""
    stop, reason = chunk.stop_reason, chunk.finish_reason
    return pb.GenerateResponse(
        index=chunk.index,
        token_offset=chunk.token_offset,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=logprobs_to_proto(chunk.logprobs),
        finish_reason=None if reason is None else FINISH_REASONS[reason],
        stop_string=stop if isinstance(stop, str) else None,
        stop_token_id=stop if isinstance(stop, int) else None,
        start=None if chunk.start is None else _start(chunk.start, with_loads),
        usage=None if chunk.usage is None else _usage(chunk.usage),
    )


def _start(start: Start, with_loads: bool) -> pb.Start:
    return pb.Start(
        request_id=start.request_id,
        model=start.model,
        num_prompt_tokens=start.num_prompt_tokens,
        num_cached_tokens=start.num_cached_tokens,
        routing=routing_message(
            start.decision, with_candidates=start.explains_routing, with_loads=with_loads
        ),
        seed=start.seed,
        prompt_logprobs=logprobs_to_proto(start.prompt_logprobs),
    )


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        time_to_first_token_s=usage.time_to_first_token_s,
        total_time_s=usage.total_time_s,
    )
