"""Converts Quire's types to protobuf messages and back. No other module knows both.

Prompts and block hashes travel as raw bytes (little-endian uint32s, 32-byte hashes): a repeated
field would cost a Python object for each token or hash.
"""

from collections.abc import Iterable, MutableMapping, MutableSequence, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from quire.v1 import group_pb2 as group_pb
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.events import (
    DIGEST_BYTES,
    MAX_TIERS,
    BlockContent,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    Digest,
    EventBatch,
)
from quire.worker.blocks.hashing import HASH_BYTES, BlockHash, BlockHashes, Feature, TokenIds
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.request.arrays import Floats
from quire.worker.request.engine_stats import EngineStats
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.outputs import Fetched, FinishReason, TokenLogprobs
from quire.worker.request.request import Prepared, Task
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.request.structured import Constraint

_SAMPLING = [field.name for field in pb.SamplingParams.DESCRIPTOR.fields]
_DEFAULTS = SamplingParams()
_LEFT_OUT = {name: (getattr(_DEFAULTS, name), None, ()) for name in _SAMPLING}
_TASKS: dict[Task, group_pb.Task] = {"generate": group_pb.GENERATE, "embed": group_pb.EMBED}
_TASK_OF = {number: task for task, number in _TASKS.items()}
_NO_PARENT = BlockHash(bytes(HASH_BYTES))
_NOT_THE_ENGINES = ("num_unsent_tokens", "num_gateways")
_LOAD = [
    field.name for field in group_pb.Load.DESCRIPTOR.fields if field.name not in _NOT_THE_ENGINES
]


def tokens_to_bytes(token_ids: Sequence[int] | TokenIds) -> bytes:
    """Encodes token ids as little-endian uint32s, for `tokens_from_bytes`."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def tokens_from_bytes(data: bytes) -> TokenIds:
    """Decodes `tokens_to_bytes`. Raises InvalidRequest: ``data`` is not a whole number of
    uint32s."""
    if len(data) % 4:
        raise InvalidRequest(f"token ids of {len(data)} bytes: not a multiple of 4")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def params_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Encodes ``params`` without defaults and ``None``. A missing field means the same to the
    receiver, except ``max_tokens``, which the gateway sets to a number before it sends anything."""
    values: dict[str, Any] = {}
    for name, left_out in _LEFT_OUT.items():
        value = getattr(params, name)
        if value in left_out:
            continue
        if isinstance(value, tuple):
            value = [pb.TokenIds(ids=each) if isinstance(each, tuple) else each for each in value]
        elif isinstance(value, Constraint):
            value = pb.Constraint(**{value.kind: value.text})
        values[name] = value
    return pb.SamplingParams(**values)


def params_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Decodes `params_to_proto`. Raises InvalidRequest: a value is out of its range."""
    return SamplingParams(**_values(message))


def _values(message: pb.SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if isinstance(value, MutableSequence):
            value = tuple(
                [tuple(each.ids) if isinstance(each, pb.TokenIds) else each for each in value]
            )
        elif isinstance(value, MutableMapping):
            value = dict(value)
        elif isinstance(value, pb.Constraint):
            value = _constraint_of(value)
        values[field.name] = value
    return values


def _constraint_of(message: pb.Constraint) -> Constraint:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(
            "structured_outputs is empty: leave it out, or set one field",
            param="structured_outputs",
        )
    return Constraint(kind, getattr(message, kind))


def work_of(request: Prepared) -> bytes:
    """``request`` as an encoded `Work`, which groups receive for all its completions and
    attempts."""
    return group_pb.Work(
        segments=_segments(request.prompt_token_ids, request.features),
        sampling=params_to_proto(request.sampling),
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        task=_TASKS[request.task],
        keep_s=request.keep_s,
    ).SerializeToString()


def prepared_of(submit: group_pb.Submit, *, request_id: str) -> Prepared:
    """The request in ``submit``, with ``request_id`` as its id. Values that a gateway has checked
    are not checked again.

    Raises:
        InvalidRequest: ``submit`` cannot be decoded.
    """
    try:
        work = group_pb.Work.FromString(submit.work)
    except DecodeError as error:
        raise InvalidRequest(f"work of {len(submit.work)} bytes is broken: {error}") from None
    sampling = _DEFAULTS.changed(**_values(work.sampling))
    if submit.hand_over_after:
        end = len(submit.resumed_token_ids) // 4 + submit.hand_over_after
        sampling = sampling.changed(max_tokens=min(sampling.max_tokens or 0, end))
    prompt_token_ids, features = _prompt_of(work.segments)
    return Prepared(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        features=features,
        resumed_token_ids=tokens_from_bytes(submit.resumed_token_ids),
        sampling=sampling.of_completion(submit.completion),
        adapter=work.adapter,
        cache_salt=work.cache_salt,
        priority=work.priority,
        keep_s=work.keep_s,
        tenant=work.tenant,
        task=_task_of(work.task),
        is_checked=True,
        source=source_from_proto(submit.source) if submit.HasField("source") else None,
    )


def source_to_proto(source: PeerSource) -> group_pb.BlockSource:
    return group_pb.BlockSource(**asdict(source))


def source_from_proto(message: group_pb.BlockSource) -> PeerSource:
    return PeerSource(**_by_name(message))


def format_to_proto(format: KvFormat) -> group_pb.KvFormat:
    return group_pb.KvFormat(**asdict(format))


def format_from_proto(message: group_pb.KvFormat) -> KvFormat:
    return KvFormat(**_by_name(message))


def fetched_to_proto(fetched: Fetched) -> group_pb.Fetched:
    return group_pb.Fetched(**fetched._asdict())


def fetched_from_proto(message: group_pb.Fetched) -> Fetched:
    return Fetched(**_by_name(message))


def _by_name(message: Message) -> dict[str, Any]:
    """The values of all fields of ``message``, which must be scalars, by name."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _task_of(number: group_pb.Task) -> Task:
    task = _TASK_OF.get(number)
    if task is None:
        raise InvalidRequest(f"task={number} is not known to this group: {' or '.join(_TASKS)}")
    return task


def _segments(token_ids: TokenIds, features: Sequence[Feature]) -> list[group_pb.Segment]:
    segments, done = [], 0
    for feature in features:
        begin, end = feature.begin, feature.begin + feature.num_tokens
        if done < begin:
            segments.append(group_pb.Segment(token_ids=tokens_to_bytes(token_ids[done:begin])))
        tokens = tokens_to_bytes(token_ids[begin:end])
        segments.append(group_pb.Segment(token_ids=tokens, feature_digest=feature.digest))
        done = end
    if done < len(token_ids):
        segments.append(group_pb.Segment(token_ids=tokens_to_bytes(token_ids[done:])))
    return segments


def _prompt_of(segments: Sequence[group_pb.Segment]) -> tuple[TokenIds, tuple[Feature, ...]]:
    if len(segments) == 1 and not segments[0].feature_digest:
        return tokens_from_bytes(segments[0].token_ids), ()
    features, parts, done = [], [b""], 0
    for segment in segments:
        parts.append(segment.token_ids)
        num_tokens = len(segment.token_ids) // 4
        if digest := segment.feature_digest:
            features.append(Feature(begin=done, num_tokens=num_tokens, digest=digest))
        done += num_tokens
    return tokens_from_bytes(b"".join(parts)), tuple(features)


FINISH_REASONS: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
FINISH_REASON_OF = {number: reason for reason, number in FINISH_REASONS.items()}


def vector_to_bytes(vector_C: Floats) -> bytes:
    """Encodes C numbers as little-endian float32s, for `vector_from_bytes`."""
    return vector_C.astype("<f4").tobytes()


def vector_from_bytes(data: bytes) -> Floats:
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


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
    """The engine's part of `Load`: all fields but those in `_NOT_THE_ENGINES`."""
    return group_pb.Load(**{name: getattr(stats, name) for name in _LOAD})


def events_to_proto(batch: EventBatch) -> group_pb.EventBatch:
    """Encodes a batch; hashes are concatenated, 32 bytes each."""
    message = group_pb.EventBatch(epoch=batch.epoch, first_seq=batch.first_seq)
    if batch.digest is not None:
        message.digest = batch.digest
    if batch.snapshot is not None:
        message.snapshot.stored = batch.snapshot.data
        message.snapshot.slower.extend(hashes.data for hashes in batch.slower)
        if batch.buckets is not None:
            message.snapshot.buckets = batch.buckets
    for event in batch.events:
        hashes = BlockHashes.of(event.hashes).data
        if isinstance(event, BlocksStored):
            message.events.add(stored=hashes, tier=event.tier)
        else:
            message.events.add(removed=hashes)
    return message


def events_from_proto(message: group_pb.EventBatch) -> EventBatch:
    """Decodes `events_to_proto`. Raises ValueError: hashes or a digest have a wrong length, or a
    tier does not exist."""
    snapshot = buckets = digest = None
    slower = [BlockHashes(data) for data in message.snapshot.slower]
    if len(slower) >= MAX_TIERS:
        raise ValueError(f"snapshot of {1 + len(slower)} tiers: must be {MAX_TIERS} at most")
    if message.HasField("snapshot"):
        snapshot = BlockHashes(message.snapshot.stored)
        buckets = message.snapshot.buckets if message.snapshot.HasField("buckets") else None
    if message.HasField("digest"):
        digest = Digest(message.digest)
        if len(digest) not in range(DIGEST_BYTES, (MAX_TIERS + 1) * DIGEST_BYTES, DIGEST_BYTES):
            raise ValueError(
                f"digest of {len(digest)} bytes: must have {DIGEST_BYTES} for each of 1 to "
                f"{MAX_TIERS} tiers"
            )
    return EventBatch(
        epoch=message.epoch,
        first_seq=message.first_seq,
        events=tuple([_event(event) for event in message.events]),
        snapshot=snapshot,
        slower=tuple(slower),
        buckets=buckets,
        digest=digest,
    )


def _event(message: group_pb.BlockEvent) -> BlockEvent:
    if message.removed:
        return BlocksRemoved(BlockHashes(message.removed))
    if message.tier >= MAX_TIERS:
        raise ValueError(f"tier={message.tier}: must be below {MAX_TIERS}")
    return BlocksStored(BlockHashes(message.stored), message.tier)


Described = tuple[BlockHash, BlockContent]
"""A block's hash and content."""


def contents_to_proto(blocks: Sequence[Described]) -> group_pb.Contents:
    """Encodes blocks and their contents; the caller sets how many more messages follow."""
    spaces: dict[tuple[str, str], int] = {}
    space_of = [
        spaces.setdefault((each.adapter, each.cache_salt), len(spaces)) for _, each in blocks
    ]
    return group_pb.Contents(
        hashes=b"".join([name for name, _ in blocks]),
        parents=b"".join([each.parent or _NO_PARENT for _, each in blocks]),
        token_ids=b"".join([each.token_ids for _, each in blocks]),
        namespaces=[group_pb.Namespace(adapter=name, cache_salt=salt) for name, salt in spaces],
        namespace_of=tokens_to_bytes(space_of),
    )


def contents_from_proto(message: group_pb.Contents, *, block_size: int) -> list[Described]:
    """Decodes `contents_to_proto`. Raises ValueError: the parts are not of the same number of
    blocks, or a namespace is missing."""
    names = BlockHashes(message.hashes)
    parents = BlockHashes(message.parents)
    num_bytes = 4 * block_size
    space_of = tokens_from_bytes(message.namespace_of).tolist()
    lengths = (len(parents), len(space_of), len(message.token_ids) / num_bytes)
    if any(length != len(names) for length in lengths):
        raise ValueError(
            f"contents of {len(names)} blocks have {lengths[0]} parents, {lengths[1]} namespaces "
            f"and {lengths[2]:g} times {block_size} tokens"
        )
    spaces = [(each.adapter, each.cache_salt) for each in message.namespaces]
    if space_of and max(space_of) >= len(spaces):
        raise ValueError(f"namespace {max(space_of)} of a block: there are {len(spaces)}")
    return [
        (
            name,
            BlockContent(
                None if parent == _NO_PARENT else parent,
                message.token_ids[place * num_bytes : (place + 1) * num_bytes],
                *spaces[space],
            ),
        )
        for place, (name, parent, space) in enumerate(zip(names, parents, space_of, strict=True))
    ]
