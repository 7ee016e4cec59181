from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListGroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("groups", "gateway", "num_groups")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    gateway: GatewayLoad
    num_groups: int
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., gateway: _Optional[_Union[GatewayLoad, _Mapping]] = ..., num_groups: _Optional[int] = ...) -> None: ...

class GatewayLoad(_message.Message):
    __slots__ = ("num_inflight", "num_queued", "ttft_bounds_s", "ttft_counts")
    NUM_INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    TTFT_BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    num_inflight: int
    num_queued: int
    ttft_bounds_s: _containers.RepeatedScalarFieldContainer[float]
    ttft_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_inflight: _Optional[int] = ..., num_queued: _Optional[int] = ..., ttft_bounds_s: _Optional[_Iterable[float]] = ..., ttft_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("id", "address", "state", "trouble", "model", "tensor_parallel_size", "num_requests", "num_running", "num_waiting", "num_pending_prefill_tokens", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_prompt_tokens", "num_hit_tokens", "num_output_tokens")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Group.State]
        SERVING: _ClassVar[Group.State]
        DRAINING: _ClassVar[Group.State]
        STOPPING: _ClassVar[Group.State]
        UNREACHABLE: _ClassVar[Group.State]
    STATE_UNSPECIFIED: Group.State
    SERVING: Group.State
    DRAINING: Group.State
    STOPPING: Group.State
    UNREACHABLE: Group.State
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: str
    state: Group.State
    trouble: str
    model: str
    tensor_parallel_size: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_output_tokens: int
    def __init__(self, id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[Group.State, str]] = ..., trouble: _Optional[str] = ..., model: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_pending_prefill_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests",)
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    def __init__(self, num_requests: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "model", "source", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    source: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., source: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "source", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    model: str
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "incomplete")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    incomplete: str
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., incomplete: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("incomplete",)
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    incomplete: str
    def __init__(self, incomplete: _Optional[str] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class UsageResponse(_message.Message):
    __slots__ = ("since", "data", "incomplete")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    since: int
    data: _containers.RepeatedCompositeFieldContainer[KeyUsage]
    incomplete: str
    def __init__(self, since: _Optional[int] = ..., data: _Optional[_Iterable[_Union[KeyUsage, _Mapping]]] = ..., incomplete: _Optional[str] = ...) -> None: ...

class KeyUsage(_message.Message):
    __slots__ = ("tenant", "key", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "minutes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MINUTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    key: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    minutes: _containers.RepeatedCompositeFieldContainer[MinuteUsage]
    def __init__(self, tenant: _Optional[str] = ..., key: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., minutes: _Optional[_Iterable[_Union[MinuteUsage, _Mapping]]] = ...) -> None: ...

class MinuteUsage(_message.Message):
    __slots__ = ("start", "requests", "prompt_tokens", "cached_tokens", "output_tokens")
    START_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    start: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    def __init__(self, start: _Optional[int] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...
