"""Host memory for evicted blocks: which stay, which slots are free, and how many requests find."""

import random
from itertools import count

from bench.eviction.baselines import FurthestNextUse
from bench.eviction.replay import Prompt, replay, scans
from bench.eviction.two_tiers import replay_in_two_tiers

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.eviction import LowestUtility
from quire.worker.parts.tiers.host_tier import HostTier

A, B, C, D, E = (BlockHash(bytes([number]) * 32) for number in range(5))


def shelf_of(max_kept: int, *, num_slots: int = 8) -> HostTier:
    return HostTier(num_slots=num_slots, max_kept=max_kept, log=EventLog(epoch=0, num_tiers=2))


def keep(
    host_tier: HostTier, name: BlockHash, parent: BlockHash | None = None, hits: int = 0
) -> bool:
    """Offers a block to the host tier; returns whether it got a slot."""
    slot = host_tier.keep(name, parent, num_hits=hits)
    if slot is not None:
        host_tier.filled(slot, b"")
        host_tier.unpin(slot)
    return slot is not None


def kept(host_tier: HostTier) -> set[BlockHash]:
    held = host_tier._log.snapshot().slower[0]
    assert {name for name, _ in host_tier.named()} == set(held)
    return set(held)


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    host_tier = shelf_of(2)
    assert keep(host_tier, B, A)
    assert keep(host_tier, A)
    assert keep(host_tier, C)
    assert kept(host_tier) == {A, C}


def test_a_block_that_is_being_filled_is_not_found_yet() -> None:
    host_tier = shelf_of(2)
    slot = host_tier.keep(A, None, num_hits=0)
    assert slot is not None
    assert host_tier.match([A]) == []
    host_tier.filled(slot, b"")
    assert host_tier.match([A]) == [slot]


def test_a_slot_that_is_in_use_is_not_given_to_another_block() -> None:
    host_tier = shelf_of(1)
    slot = host_tier.keep(A, None, num_hits=0)  # Its copy is under way.
    assert slot is not None
    assert not keep(host_tier, B)
    host_tier.filled(slot, b"")
    host_tier.unpin(slot)
    host_tier.pin(slot)  # A step reads it.
    assert not keep(host_tier, B)
    host_tier.drop(A)
    assert slot not in host_tier.take(8)
    host_tier.unpin(slot)
    assert host_tier.take(8) == [slot]


def test_copies_of_what_the_cache_has_again_go_first() -> None:
    host_tier = shelf_of(2)
    keep(host_tier, A)
    keep(host_tier, B, hits=9)
    host_tier.loaded(host_tier.match([B]))
    keep(host_tier, C)
    assert kept(host_tier) == {A, C}


def test_a_copy_of_what_the_cache_evicts_again_needs_no_other_copy() -> None:
    host_tier = shelf_of(2)
    keep(host_tier, A)
    host_tier.loaded(host_tier.match([A]))
    assert not keep(host_tier, A, hits=1)
    keep(host_tier, B)
    assert kept(host_tier) == {A, B}
    assert host_tier.num_hits(host_tier.match([A])[0]) == 1


def test_nothing_is_kept_behind_a_block_that_is_not() -> None:
    host_tier = shelf_of(3)
    keep(host_tier, C, B)
    keep(host_tier, B, A)
    pinned = [slot for name in (B, C) for slot in host_tier.match([name])]
    keep(host_tier, D)
    pinned += host_tier.match([D])
    for slot in pinned:
        host_tier.pin(slot)
    assert not keep(host_tier, A)
    assert kept(host_tier) == {D}
    for slot in pinned:
        host_tier.unpin(slot)
    assert host_tier.num_free == 7


def test_a_corrupt_block_goes_with_all_behind_it() -> None:
    host_tier = shelf_of(5)
    for name, parent in ((D, C), (C, B), (B, A), (A, None), (E, A)):
        keep(host_tier, name, parent)
    host_tier.drop(B)
    assert kept(host_tier) == {A, E}
    assert host_tier.num_free == 6


def test_no_slot_keeps_a_block_where_none_may() -> None:
    host_tier = shelf_of(0)
    assert not keep(host_tier, A)
    assert host_tier.num_free == 8


def twice_as_many_prefixes() -> list[Prompt]:
    """Prompts on twice as many equally popular prefixes as a cache of 400 blocks holds."""
    rng, ids = random.Random(0), count()

    def new(number: int) -> list[BlockHash]:
        return [BlockHash(next(ids).to_bytes(32, "big")) for _ in range(number)]

    prefixes = [new(8) for _ in range(100)]
    prompts = [rng.choice(prefixes) + new(1) for _ in range(2_000)]
    return [Prompt(hashes, 512 * len(hashes) + 1) for hashes in prompts]


def found(prompts: list[Prompt], num_blocks: int, num_kept: int) -> float:
    return replay_in_two_tiers(prompts, num_blocks=num_blocks, num_kept=num_kept).hit_rate


def best(prompts: list[Prompt], *, num_blocks: int) -> float:
    """The hit rate of a cache that evicts with knowledge of the future."""
    future = FurthestNextUse([prompt.hashes for prompt in prompts])
    ideal = replay(prompts, num_blocks=num_blocks, policy=future.policy, on_request=future.begin)
    return ideal.hit_rate


def test_of_twice_as_many_prefixes_nearly_all_that_can_be_found_is() -> None:
    prompts = twice_as_many_prefixes()
    assert found(prompts, 400, 400) >= 0.9 * best(prompts, num_blocks=800)


def test_cache_and_shelf_together_find_what_one_cache_of_their_size_would() -> None:
    prompts = scans(num_requests=1_500)
    one = replay(prompts, num_blocks=400, policy=LowestUtility).hit_rate
    assert found(prompts, 200, 200) >= 0.95 * one
