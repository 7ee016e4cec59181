"""Cached blocks and loads of groups in the messages of `SubscribeKvEvents`.

Media are named as in vLLM. Consecutive blocks of a chain form one event, whose parent is the block
before the first.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from quire.cluster.features.kv_events.ledger import Block, Change, Told, key_of
from quire.v1 import group_pb2 as pb

_TIERS = (
    (common.KV_CACHE_TIER_DEVICE, "GPU"),
    (common.KV_CACHE_TIER_HOST, "CPU"),
    (common.KV_CACHE_TIER_DISK, "STORAGE"),
)


def events_of(
    changes: Sequence[Change], *, adapter_names: Mapping[str, str]
) -> Iterator[common.KvCacheEvent]:
    """Events without ids. ``adapter_names``: clients' names of adapters, by digest."""
    for change in changes:
        tier, medium = _TIERS[change.tier]
        if not isinstance(change, Told):
            removed = common.KvBlocksRemoved(
                block_hashes=change.keys, tier=tier, medium=medium, cache_level=change.tier
            )
            yield common.KvCacheEvent(removed=removed)
            continue
        for run in _runs(change.blocks):
            first = run[0].content
            stored = common.KvBlocksStored(tier=tier, medium=medium)
            for block in run:
                token_ids = np.frombuffer(block.content.token_ids, dtype="<u4").tolist()
                stored.blocks.add(
                    block_hash=block.key,
                    token_ids=token_ids,
                    block_size=len(token_ids),
                    cache_level=change.tier,
                )
            if first.parent is not None:
                stored.parent_block_hash = key_of(first.parent)
            if first.adapter:
                stored.lora_name = adapter_names.get(first.adapter, first.adapter)
            if first.cache_salt:
                stored.cache_salt = first.cache_salt
            yield common.KvCacheEvent(stored=stored)


def _runs(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    begin = 0
    for end in range(1, len(blocks) + 1):
        if end < len(blocks):
            parent = blocks[end].content.parent
            if parent is not None and key_of(parent) == blocks[end - 1].key:
                continue
        yield blocks[begin:end]
        begin = end


def load_of(
    group: pb.GroupDescription, load: pb.Load, *, sample: int, is_alone: bool
) -> common.EngineLoad:
    """A group's load record. ``is_alone``: whether its batch has no events; then the record also
    has figures that routers do not use."""
    usage = load.num_held_blocks / group.num_blocks if group.num_blocks else 0.0
    record = common.EngineLoad(
        running_requests=load.num_running,
        waiting_requests=load.num_waiting,
        waiting_uncached_tokens=load.num_pending_prefill_tokens,
        token_usage=usage,
        active_token_usage=usage,
        max_running_requests=group.max_num_seqs,
        sample=sample,
        load_only=is_alone,
    )
    if is_alone:
        record.num_used_tokens = load.num_held_blocks * group.block_size
        record.max_total_num_tokens = group.num_blocks * group.block_size
        if load.num_prompt_tokens:
            record.cache_hit_rate = load.num_hit_tokens / load.num_prompt_tokens
    return record
