"""Blocks that clients ask to keep stay for their time, in a tenant's share, and hinder nobody."""

from tests.worker.cache.test_blocks import compute, name, names

from quire.worker.blocks.events import EventLog
from quire.worker.cache.block_pool import BlockPool
from quire.worker.cache.retention import Retention


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def keeping_pool(num_blocks: int, clock: Clock) -> BlockPool:
    return BlockPool(num_blocks=num_blocks, block_size=4, log=EventLog(epoch=0), seconds=clock)


def use(pool: BlockPool, chain: tuple[int, ...], *, tenant: str = "t", keep_s: float = 0) -> None:
    blocks = compute(pool, chain)
    if keep_s:
        pool.keep(blocks, tenant=tenant, keep_s=keep_s)
    pool.release(blocks)


def num_cached(pool: BlockPool, chain: tuple[int, ...]) -> int:
    return len(pool.match(names(chain)))


def test_a_kept_prefix_outlives_newer_ones_until_its_time_is_over() -> None:
    clock = Clock()
    pool = keeping_pool(8, clock)
    use(pool, (1, 2), keep_s=10)
    for number in range(20, 40):
        use(pool, (number, number))
    assert num_cached(pool, (1, 2)) == 2
    clock.now_s = 11
    for number in range(40, 60):
        use(pool, (number, number))
    assert num_cached(pool, (1, 2)) == 0


def test_a_tenant_keeps_its_share_at_most_and_the_beginning_of_its_prefix() -> None:
    pool = keeping_pool(16, Clock())
    use(pool, tuple(range(10)), keep_s=10)
    for number in range(20, 60):
        use(pool, (number, number))
    assert num_cached(pool, tuple(range(10))) == 4


def test_tenants_together_keep_half_and_the_greatest_gives_way() -> None:
    retention = Retention(16)
    for number, tenant in enumerate("aaaabbbb"):
        retention.keep(number, tenant=tenant, until_s=5)
    retention.keep(8, tenant="c", until_s=5)
    assert len(retention) == 8


def test_what_is_kept_never_keeps_a_request_from_its_blocks() -> None:
    pool = keeping_pool(4, Clock())
    use(pool, (1,), keep_s=10)
    assert len(pool.allocate(4)) == 4
    assert not pool.is_registered(name((1,)))


def test_keeping_the_same_prefix_again_and_again_takes_no_more_memory() -> None:
    clock = Clock()
    pool = keeping_pool(64, clock)
    for _ in range(5000):
        clock.now_s += 1
        use(pool, (1, 2, 3), keep_s=86_400)
    retention = pool._retention
    sizes = [len(ends) for ends in retention._ends.values()]
    assert max([*sizes, len(retention._waiting_by_end)]) < 100
