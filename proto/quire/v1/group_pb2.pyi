from quire.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATE: _ClassVar[Task]
    EMBED: _ClassVar[Task]
GENERATE: Task
EMBED: Task

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class HoldAdapterResponse(_message.Message):
    __slots__ = ("is_held", "refusal")
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    is_held: bool
    refusal: str
    def __init__(self, is_held: bool = ..., refusal: _Optional[str] = ...) -> None: ...

class AdapterPiece(_message.Message):
    __slots__ = ("digest", "file", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    file: str
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., file: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class KvFormat(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_bytes", "block_size")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_bytes: int
    block_size: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_bytes: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class BlocksRequest(_message.Message):
    __slots__ = ("format", "hashes", "most_useful_bytes")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    MOST_USEFUL_BYTES_FIELD_NUMBER: _ClassVar[int]
    format: KvFormat
    hashes: bytes
    most_useful_bytes: int
    def __init__(self, format: _Optional[_Union[KvFormat, _Mapping]] = ..., hashes: _Optional[bytes] = ..., most_useful_bytes: _Optional[int] = ...) -> None: ...

class BlocksLoan(_message.Message):
    __slots__ = ("num_blocks", "port", "ticket", "lease_s", "refusal", "hashes", "parents")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    port: int
    ticket: bytes
    lease_s: float
    refusal: str
    hashes: bytes
    parents: bytes
    def __init__(self, num_blocks: _Optional[int] = ..., port: _Optional[int] = ..., ticket: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., refusal: _Optional[str] = ..., hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ...) -> None: ...

class BlockSource(_message.Message):
    __slots__ = ("group_id", "address", "token", "certificate", "num_blocks")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    address: str
    token: str
    certificate: str
    num_blocks: int
    def __init__(self, group_id: _Optional[str] = ..., address: _Optional[str] = ..., token: _Optional[str] = ..., certificate: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("sources", "max_bytes")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[BlockSource]
    max_bytes: int
    def __init__(self, sources: _Optional[_Iterable[_Union[BlockSource, _Mapping]]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("num_blocks", "error")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    error: str
    def __init__(self, num_blocks: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class GroupDescription(_message.Message):
    __slots__ = ("group_id", "epoch", "model", "model_fingerprint", "kv_dtype", "block_size", "max_model_len", "vocab_size", "tensor_parallel_size", "num_blocks", "max_num_seqs", "eos_token_ids", "numerics", "kv_format", "num_tiers", "kv_events", "task")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    NUM_TIERS_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    epoch: int
    model: str
    model_fingerprint: str
    kv_dtype: str
    block_size: int
    max_model_len: int
    vocab_size: int
    tensor_parallel_size: int
    num_blocks: int
    max_num_seqs: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    numerics: str
    kv_format: KvFormat
    num_tiers: int
    kv_events: bool
    task: str
    def __init__(self, group_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., numerics: _Optional[str] = ..., kv_format: _Optional[_Union[KvFormat, _Mapping]] = ..., num_tiers: _Optional[int] = ..., kv_events: bool = ..., task: _Optional[str] = ...) -> None: ...

class GroupCommand(_message.Message):
    __slots__ = ("submit", "abort", "credit", "drain", "is_draining")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    credit: Credit
    drain: bool
    is_draining: bool
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., drain: bool = ..., is_draining: bool = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "attempt", "work", "completion", "resumed_token_ids", "token_limit", "isolated_tokens", "source", "hand_over_after", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_AFTER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    work: bytes
    completion: int
    resumed_token_ids: bytes
    token_limit: int
    isolated_tokens: int
    source: BlockSource
    hand_over_after: int
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., work: _Optional[bytes] = ..., completion: _Optional[int] = ..., resumed_token_ids: _Optional[bytes] = ..., token_limit: _Optional[int] = ..., isolated_tokens: _Optional[int] = ..., source: _Optional[_Union[BlockSource, _Mapping]] = ..., hand_over_after: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("segments", "sampling", "adapter", "cache_salt", "priority", "tenant", "task", "keep_s")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    sampling: _inference_pb2.SamplingParams
    adapter: str
    cache_salt: str
    priority: int
    tenant: str
    task: Task
    keep_s: float
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., task: _Optional[_Union[Task, str]] = ..., keep_s: _Optional[float] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("token_ids", "feature_digest")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    feature_digest: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., feature_digest: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("request_id", "attempt", "token_limit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_limit: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_limit: _Optional[int] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "load", "deltas", "phase", "num_submits", "num_requests")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SERVING: _ClassVar[StepFrame.Phase]
        DRAINING: _ClassVar[StepFrame.Phase]
        HANDING_OVER: _ClassVar[StepFrame.Phase]
    SERVING: StepFrame.Phase
    DRAINING: StepFrame.Phase
    HANDING_OVER: StepFrame.Phase
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_SUBMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    load: Load
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    phase: StepFrame.Phase
    num_submits: int
    num_requests: int
    def __init__(self, step: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., phase: _Optional[_Union[StepFrame.Phase, str]] = ..., num_submits: _Optional[int] = ..., num_requests: _Optional[int] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "attempt", "token_offset", "token_ids", "logprobs", "finish_reason", "num_cached_tokens", "fetched", "error", "prompt_logprobs", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_offset: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish_reason: _inference_pb2.FinishReason
    num_cached_tokens: int
    fetched: Fetched
    error: GroupError
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    embedding: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_offset: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., error: _Optional[_Union[GroupError, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("num_host_tokens", "num_disk_tokens", "num_peer_tokens", "wait_s", "error")
    NUM_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    num_host_tokens: int
    num_disk_tokens: int
    num_peer_tokens: int
    wait_s: float
    error: str
    def __init__(self, num_host_tokens: _Optional[int] = ..., num_disk_tokens: _Optional[int] = ..., num_peer_tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class GroupError(_message.Message):
    __slots__ = ("code", "message", "param")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[GroupError.Code]
        INVALID_REQUEST: _ClassVar[GroupError.Code]
        QUEUE_FULL: _ClassVar[GroupError.Code]
        GROUP_FAILED: _ClassVar[GroupError.Code]
        DRAINING: _ClassVar[GroupError.Code]
        OTHER_ISOLATED: _ClassVar[GroupError.Code]
        BROKEN_LOGITS: _ClassVar[GroupError.Code]
        CONSTRAINT_REFUSED: _ClassVar[GroupError.Code]
        ADAPTER_MISSING: _ClassVar[GroupError.Code]
    CODE_UNSPECIFIED: GroupError.Code
    INVALID_REQUEST: GroupError.Code
    QUEUE_FULL: GroupError.Code
    GROUP_FAILED: GroupError.Code
    DRAINING: GroupError.Code
    OTHER_ISOLATED: GroupError.Code
    BROKEN_LOGITS: GroupError.Code
    CONSTRAINT_REFUSED: GroupError.Code
    ADAPTER_MISSING: GroupError.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: GroupError.Code
    message: str
    param: str
    def __init__(self, code: _Optional[_Union[GroupError.Code, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_pending_prefill_tokens", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_prompt_tokens", "num_hit_tokens", "num_output_tokens", "num_preemptions", "num_unsent_tokens", "num_gateways", "num_drafted_tokens", "num_accepted_tokens", "adapters", "max_adapters", "num_adapters", "num_adapter_loads", "num_host_tokens", "num_disk_tokens", "disk_s", "num_peer_tokens", "peer_s", "num_lent_tokens", "num_corrupt_blocks", "num_failed_pulls")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISK_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_LENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_PULLS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_unsent_tokens: int
    num_gateways: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    max_adapters: int
    num_adapters: int
    num_adapter_loads: int
    num_host_tokens: int
    num_disk_tokens: int
    disk_s: float
    num_peer_tokens: int
    peer_s: float
    num_lent_tokens: int
    num_corrupt_blocks: int
    num_failed_pulls: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pending_prefill_tokens: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_unsent_tokens: _Optional[int] = ..., num_gateways: _Optional[int] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., max_adapters: _Optional[int] = ..., num_adapters: _Optional[int] = ..., num_adapter_loads: _Optional[int] = ..., num_host_tokens: _Optional[int] = ..., num_disk_tokens: _Optional[int] = ..., disk_s: _Optional[float] = ..., num_peer_tokens: _Optional[int] = ..., peer_s: _Optional[float] = ..., num_lent_tokens: _Optional[int] = ..., num_corrupt_blocks: _Optional[int] = ..., num_failed_pulls: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("epoch", "next_seq", "buckets", "with_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    WITH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    next_seq: int
    buckets: bytes
    with_tokens: bool
    def __init__(self, epoch: _Optional[int] = ..., next_seq: _Optional[int] = ..., buckets: _Optional[bytes] = ..., with_tokens: bool = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("epoch", "first_seq", "events", "snapshot", "digest", "contents")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    first_seq: int
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    snapshot: Snapshot
    digest: bytes
    contents: Contents
    def __init__(self, epoch: _Optional[int] = ..., first_seq: _Optional[int] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., digest: _Optional[bytes] = ..., contents: _Optional[_Union[Contents, _Mapping]] = ...) -> None: ...

class Contents(_message.Message):
    __slots__ = ("hashes", "parents", "token_ids", "namespaces", "namespace_of", "num_more", "num_blocks")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_OF_FIELD_NUMBER: _ClassVar[int]
    NUM_MORE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    parents: bytes
    token_ids: bytes
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    namespace_of: bytes
    num_more: int
    num_blocks: int
    def __init__(self, hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ..., namespace_of: _Optional[bytes] = ..., num_more: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("adapter", "cache_salt")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    cache_salt: str
    def __init__(self, adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("stored", "removed", "tier")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    removed: bytes
    tier: int
    def __init__(self, stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., tier: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("stored", "slower", "buckets")
    STORED_FIELD_NUMBER: _ClassVar[int]
    SLOWER_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    stored: bytes
    slower: _containers.RepeatedScalarFieldContainer[bytes]
    buckets: bytes
    def __init__(self, stored: _Optional[bytes] = ..., slower: _Optional[_Iterable[bytes]] = ..., buckets: _Optional[bytes] = ...) -> None: ...
