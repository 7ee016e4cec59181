from hypothesis import example, given
from hypothesis import strategies as st

from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.eviction import EvictionQueue, LowestUtility, _worth_by_age


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=400))
def test_the_lowest_score_is_popped_however_often_blocks_came_and_went(
    changes: list[tuple[int, int, bool]],
) -> None:
    queue, model = EvictionQueue[int](), dict[int, int]()
    for block_id, score, is_push in changes:
        queue.remove(block_id)
        model.pop(block_id, None)
        if is_push:
            queue.push(block_id, score)
            model[block_id] = score
        assert len(queue) == len(model)
    while model:
        lowest = min(model.values())
        assert model.pop(queue.pop()) == lowest


def store(policy: LowestUtility, block_id: int, name: str, *, now: int) -> None:
    policy.stored(block_id, BlockHash(name.encode()), position=0, now=now)
    policy.released(block_id, now=now)
    policy.offer(block_id, now=now)


def hit(policy: LowestUtility, block_id: int, *, now: int) -> None:
    policy.held(block_id, now=now)
    policy.hit(block_id)
    policy.released(block_id, now=now)
    policy.offer(block_id, now=now)


def test_before_anything_is_learnt_the_block_used_longest_ago_goes() -> None:
    policy = LowestUtility(4)
    for now, block_id in enumerate((2, 0, 3, 1)):
        store(policy, block_id, f"block {block_id}", now=now)
    assert [policy.evict(now=4) for _ in range(4)] == [2, 0, 3, 1]


def test_a_block_that_comes_back_after_its_eviction_learns_to_stay() -> None:
    policy = LowestUtility(100)
    for block_id in range(99):
        store(policy, block_id, f"once, {block_id}", now=block_id)
    now, is_resident, num_hits = 99, False, 0
    for number in range(6000):
        if number % 150 == 0:  # LRU would have evicted it by then.
            if is_resident:
                num_hits += 1
                hit(policy, 99, now=now)
            else:
                store(policy, 99, "comes back", now=now)
                is_resident = True
        block_id = policy.evict(now=now)
        now += 1
        if block_id == 99:
            is_resident = False
        else:
            store(policy, block_id, f"once, {now}", now=now)
    assert num_hits > 20


@given(
    num_released=st.floats(0, 1e6),
    returned=st.lists(st.floats(0, 1e6) | st.integers(0, 9).map(float), min_size=1, max_size=12),
)
@example(num_released=0.0, returned=[2.0])
@example(num_released=3.0, returned=[0.0, 8.0, 1.0])
def test_no_counts_make_a_worth_that_is_none(num_released: float, returned: list[float]) -> None:
    """Counts of returns decay later than those of releases, but worths stay bounded."""
    worths = _worth_by_age(num_released, returned)
    assert all(0 <= worth <= 2 for worth in worths)  # A block returns once, after half a tick.
