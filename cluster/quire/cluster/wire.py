"""Our types as protobuf messages and back. The only place that knows both.

Prompts and block hashes travel as raw bytes (little-endian uint32s, 32-byte hashes): a repeated
field would cost a Python object for each of them.
"""

from collections.abc import Iterable, MutableMapping, MutableSequence, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from quire.v1 import group_pb2 as group_pb
from quire.v1 import inference_pb2 as pb
from quire.worker.api.engine_stats import EngineStats
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.events import (
    DIGEST_BYTES,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    Digest,
    EventBatch,
)
from quire.worker.api.hashing import BlockHashes, TokenIds
from quire.worker.api.outputs import FinishReason, TokenLogprobs
from quire.worker.api.request import Prepared
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.api.structured import Constraint

_SAMPLING = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields]
_DEFAULTS = SamplingParams()
_KEPT_BACK = (
    "client_id",
    "explain_routing",
    "shown_token_ids",
    "hashes",
    "model",
    "arrival_s",
    "deadline_s",
    "task",
    "outputs",
)
"""Fields of a request that a group does not need: it names blocks itself, and has its own clock.
Through a gateway all requests are of one task, and want no more than tokens."""
_SENT = [field.name for field in fields(Prepared) if field.name not in _KEPT_BACK]
_NOT_THE_ENGINES = ("num_unsent_tokens", "num_gateways")
_LOAD = [
    field.name for field in group_pb.Load.DESCRIPTOR.fields if field.name not in _NOT_THE_ENGINES
]


def tokens_to_bytes(token_ids: Sequence[int] | TokenIds) -> bytes:
    """Four bytes each, little-endian: what `tokens_from_bytes` reads."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def tokens_from_bytes(data: bytes) -> TokenIds:
    """Raises InvalidRequest where ``data`` is not a whole number of uint32s."""
    if len(data) % 4:
        raise InvalidRequest(f"token ids of {len(data)} bytes: not a multiple of 4")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def params_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Leaves out what is ``None``, which means the same on the other side except for
    ``max_tokens``: the gateway has put a number there before it sends anything."""
    values = ((name, getattr(params, name)) for name in _SAMPLING)
    return pb.SamplingParams(
        **{name: _encoded(value) for name, value in values if value is not None and value != ()}
    )


def params_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest: a value is out of its range."""
    return SamplingParams(**_values(message))


def _params_of(message: pb.SamplingParams) -> SamplingParams:
    """What `params_to_proto` has sent, which was checked there."""
    return _DEFAULTS.changed(**_values(message))


def _values(message: pb.SamplingParams) -> dict[str, Any]:
    return {field.name: _decoded(value) for field, value in message.ListFields()}


def submit_of(request: Prepared, *, attempt: int, probation_tokens: int) -> group_pb.Submit:
    """The message to a group for ``request`` and this attempt."""
    return group_pb.Submit(
        **{name: _encoded(getattr(request, name)) for name in _SENT},
        attempt=attempt,
        probation_tokens=probation_tokens,
    )


def prepared_of(submit: group_pb.Submit, **known: Any) -> Prepared:
    """The request in ``submit``; ``known`` replaces fields.

    What a gateway has checked is not checked again.
    """
    return Prepared(**{name: _decoded(getattr(submit, name)) for name in _SENT} | known)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tokens_to_bytes(value)
    if isinstance(value, Constraint):
        return pb.Constraint(**{value.kind: value.text})
    if isinstance(value, tuple):
        return [pb.TokenIds(ids=each) if isinstance(each, tuple) else each for each in value]
    return params_to_proto(value) if isinstance(value, SamplingParams) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return tokens_from_bytes(value)
    if isinstance(value, pb.Constraint):
        kind = value.WhichOneof("kind")
        if kind is None:
            raise InvalidRequest(
                "structured_outputs is empty: leave it out, or set one field",
                param="structured_outputs",
            )
        return Constraint(kind, getattr(value, kind))
    if isinstance(value, MutableSequence):
        return tuple(tuple(each.ids) if isinstance(each, pb.TokenIds) else each for each in value)
    if isinstance(value, MutableMapping):
        return dict(value)
    return _params_of(value) if isinstance(value, pb.SamplingParams) else value


FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
FINISH_REASON_OF = {number: reason for reason, number in FINISH_REASONS.items()}


def logprobs_from_proto(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=each.token_id,
            logprob=each.logprob,
            rank=each.rank,
            top=tuple([(top.token_id, top.logprob) for top in each.top]),
        )
        for each in messages
    )


def logprobs_to_proto(logprobs: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[pb.TopLogprob(token_id=token, logprob=value) for token, value in entry.top],
        )
        for entry in logprobs
    ]


def stats_to_proto(stats: EngineStats) -> group_pb.Load:
    """All of `Load` but what the engine does not know of."""
    return group_pb.Load(**{name: getattr(stats, name) for name in _LOAD})


def events_to_proto(batch: EventBatch) -> group_pb.EventBatch:
    """Hashes lie one after the other, 32 bytes each."""
    message = group_pb.EventBatch(epoch=batch.epoch, first_seq=batch.first_seq)
    if batch.digest is not None:
        message.digest = batch.digest
    if batch.snapshot is not None:
        message.snapshot.stored = batch.snapshot.data
        if batch.buckets is not None:
            message.snapshot.buckets = batch.buckets
    for event in batch.events:
        hashes = BlockHashes.of(event.hashes).data
        if isinstance(event, BlocksStored):
            message.events.add(stored=hashes)
        else:
            message.events.add(removed=hashes)
    return message


def events_from_proto(message: group_pb.EventBatch) -> EventBatch:
    """Raises ValueError where what should be hashes or a digest has another length."""
    snapshot = buckets = digest = None
    if message.HasField("snapshot"):
        snapshot = BlockHashes(message.snapshot.stored)
        buckets = message.snapshot.buckets if message.snapshot.HasField("buckets") else None
    if message.HasField("digest"):
        digest = Digest(message.digest)
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"digest of {len(digest)} bytes: must have {DIGEST_BYTES}")
    return EventBatch(
        epoch=message.epoch,
        first_seq=message.first_seq,
        events=tuple([_event(event) for event in message.events]),
        snapshot=snapshot,
        buckets=buckets,
        digest=digest,
    )


def _event(message: group_pb.BlockEvent) -> BlockEvent:
    if message.removed:
        return BlocksRemoved(BlockHashes(message.removed))
    return BlocksStored(BlockHashes(message.stored))
