"""Tokens that a group has generated for one request and not yet sent, and its credit to send
them."""

from quire.cluster.features.tracing.attempt_spans import AttemptSpans
from quire.cluster.wire import (
    FINISH_REASONS,
    fetched_to_proto,
    logprobs_to_proto,
    vector_to_bytes,
)
from quire.v1 import group_pb2 as pb
from quire.worker.request.outputs import TokenDelta

Key = tuple[str, int]
"""A request's id and the number of its attempt."""


class OutputBuffer:
    """One attempt's unsent tokens, and its credit."""

    __slots__ = (
        *("_unsent", "cleared_at", "engine_id", "is_cleared", "num_output", "spans"),
        "token_limit",
    )

    def __init__(self, engine_id: str, token_limit: int) -> None:
        self.engine_id = engine_id
        self.token_limit = token_limit
        self.num_output = 0
        """Number of output tokens so far, including resumed ones."""
        self.cleared_at = 0
        self.is_cleared = False
        """Whether it has generated the tokens that clear an isolated request, or has ended."""
        self.spans: AttemptSpans | None = None
        """The attempt's part of its trace; ``None`` if it is not sampled."""
        self._unsent: pb.TokenDelta | None = None

    @property
    def num_unsent(self) -> int:
        return 0 if self._unsent is None else len(self._unsent.token_ids)

    @property
    def can_send(self) -> bool:
        """Whether `take` has anything to return: tokens within the limit, or an end without
        tokens."""
        delta = self._unsent
        if delta is None:
            return False
        return (
            not self.token_limit
            or delta.token_offset < self.token_limit
            or not delta.token_ids  # An end without tokens.
        )

    def add(self, key: Key, output: TokenDelta) -> None:
        delta = self._unsent
        if delta is None:
            # Sets only fields that are not empty, because this runs for every token.
            self._unsent = delta = pb.TokenDelta(
                request_id=key[0], attempt=key[1], token_offset=output.token_offset
            )
            if output.num_cached_tokens:
                delta.num_cached_tokens = output.num_cached_tokens
        delta.token_ids.extend(output.token_ids)
        if output.logprobs:
            delta.logprobs.extend(logprobs_to_proto(output.logprobs))
        if output.prompt_logprobs:
            delta.prompt_logprobs.extend(logprobs_to_proto(output.prompt_logprobs))
        if output.fetched is not None:
            delta.fetched.CopyFrom(fetched_to_proto(output.fetched))
        if output.hidden is not None:
            delta.embedding = vector_to_bytes(output.hidden[0])
        if output.finish_reason is not None:
            delta.finish_reason = FINISH_REASONS[output.finish_reason]
        self.num_output = output.token_offset + len(output.token_ids)
        self.is_cleared = self.num_output >= self.cleared_at or output.finish_reason is not None

    def take(self) -> pb.TokenDelta:
        """Removes and returns the tokens that may be sent now. The last one has the finish
        reason."""
        delta = self._unsent
        assert delta is not None
        room = max(0, self.token_limit - delta.token_offset)
        if not self.token_limit or len(delta.token_ids) <= room:
            self._unsent = None
            return delta
        head = pb.TokenDelta()
        head.CopyFrom(delta)
        head.ClearField("finish_reason")
        del head.token_ids[room:], head.logprobs[room:]
        del delta.token_ids[:room], delta.logprobs[:room], delta.prompt_logprobs[:]
        delta.ClearField("fetched")
        delta.token_offset += room
        return head
