"""Replays prompts through a KV cache and a host memory tier that keeps evicted blocks."""

from bench.eviction.replay import TRACE_BLOCK_SIZE, Prompt, Savings, prefill_ms

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.parts.tiers.host_tier import HostTier


def replay_in_two_tiers(
    prompts: list[Prompt],
    *,
    num_blocks: int,
    num_kept: int,
    block_size: int = TRACE_BLOCK_SIZE,
) -> Savings:
    """As `bench.eviction.replay.replay`, with ``num_kept`` blocks in host memory beside
    ``num_blocks`` in the KV cache. Tokens found in either count.

    Raises:
        NoFreeBlocks: A prompt does not fit into the pool.
    """
    log = EventLog(epoch=0, num_tiers=2)
    pool = BlockPool(num_blocks=num_blocks, block_size=block_size, log=log)
    host_tier = HostTier(num_slots=num_kept, max_kept=num_kept, log=log)

    def spill(block_id: BlockId, name: BlockHash, parent: BlockHash | None) -> None:
        slot = host_tier.keep(name, parent, num_hits=pool.num_hits(block_id))
        if slot is not None:
            host_tier.filled(slot, b"")
            host_tier.unpin(slot)

    pool.spill = spill
    num_tokens = num_hit_tokens = 0
    cost = saved = 0.0
    for prompt in prompts:
        wanted = prompt.hashes[: (prompt.num_tokens - 1) // block_size]
        held = pool.match(wanted)
        slots = host_tier.match(wanted[len(held) :])
        pool.acquire(held)
        for slot in slots:
            host_tier.pin(slot)
        loaded = pool.allocate(len(slots))
        names = wanted[len(held) : len(held) + len(slots)]
        hits = [host_tier.num_hits(slot) + 1 for slot in slots]
        pool.register(loaded, names, parent=held[-1] if held else None, num_hits=hits)
        host_tier.loaded(slots)
        for slot in slots:
            host_tier.unpin(slot)
        held += loaded
        own = pool.allocate(-(-prompt.num_tokens // block_size) - len(held))
        names = prompt.hashes[len(held) :]
        pool.register(own[: len(names)], names, parent=held[-1] if held else None)
        pool.release([*held, *own])
        num_tokens += prompt.num_tokens
        num_hit_tokens += len(held) * block_size
        cost += prefill_ms(prompt.num_tokens)
        saved += prefill_ms(len(held) * block_size)
    return Savings(num_tokens, num_hit_tokens, cost, saved)
