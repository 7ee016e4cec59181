"""Requests that wait for blocks of another group, on a clock that tests advance: how long they
wait, who may use the KV cache meanwhile, and what happens to late blocks."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.worker.conftest import owner
from tests.worker.engine_requests import (
    MakeEngine,
    range_prompt,
    request,
    run,
)

from quire.worker.blocks.hashing import BlockHashes
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.pull import Pull
from quire.worker.request.outputs import TokenDelta

SIZE = 4
BLOCK_BYTES = SIZE * 3 * 8
PROMPT = range_prompt(81)
"""A prompt of 20 blocks that another group may have, and a token."""


class Rig:
    """An engine that computes a block in 1 s, and fetches from a group that the test controls."""

    def __init__(self, make_engine: MakeEngine, **options: Any) -> None:
        self.now_s = 0.0
        self.pulls: list[Pull] = []
        self.engine, self.executor = make_engine(
            **{"num_blocks": 64, **options},
            host_kv_bytes=256 * BLOCK_BYTES,
            fetch=self.pulls.append,
            clock=lambda: self.now_s,
            max_num_batched_tokens=512,
        )
        self.executor.on_execute = self._take_time
        self.num_landed = 0

    def _take_time(self, step: Any) -> None:
        self.now_s += (len(step.token_ids_T) - step.num_decodes) / SIZE

    def measure(self) -> None:
        """Lets the engine measure its speed."""
        run(self.engine, request("first", range_prompt(81, first=7), max_tokens=1))

    def ask(self, name: str = "r", num_blocks: int = 20) -> None:
        source = PeerSource(group_id="other", address="", num_blocks=num_blocks)
        self.engine.add_request(request(name, PROMPT, max_tokens=1, source=source))

    def land(self, num_blocks: int, pull: Pull | None = None) -> None:
        pull = pull or self.pulls[-1]
        for _ in range(num_blocks):
            slot = pull.next_slot(0)
            assert slot is not None
            positions = range(self.num_landed * SIZE, (self.num_landed + 1) * SIZE)
            words = [[PROMPT[each], each, owner("")] for each in positions]
            block_C = np.array(words, np.int64).reshape(-1).view(np.uint8)
            pull.host_blocks_XC[slot] = block_C
            pull.landed(self.num_landed, slot, checksum_of(block_C))
            self.num_landed += 1

    def step(self, *, at_s: float | None = None) -> list[TokenDelta]:
        if at_s is not None:
            self.now_s = at_s
        return self.engine.step()


@pytest.fixture
def rig(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    monkeypatch.setattr("quire.worker.parts.tiers.transfers._WAIT_S", 0.0)
    return lambda **options: Rig(make_engine, **options)


def test_a_request_waits_while_that_pays_and_a_tenth_longer(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.measure()
    begin_s = group.now_s
    group.ask()
    group.land(6)
    # 6 blocks would have taken 6 s, all 20 would take 20 s: it waits until 6 + 2 s.
    assert group.step(at_s=begin_s + 7.9) == []
    assert group.engine.stats().num_waiting == 1
    (output,) = group.step(at_s=begin_s + 8.1)
    assert output.num_cached_tokens == 24
    assert output.fetched is not None
    assert output.fetched.num_peer_tokens == 24
    assert output.fetched.error == "14 blocks came too late: computing them is sooner"
    # All in all it took 8.1 s of waiting and 14 s of computing, for 20 s.
    assert group.now_s - begin_s <= 1.1 * 20 + 1
    assert group.pulls[0].is_cancelled


def test_more_blocks_make_it_wait_for_longer(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.measure()
    begin_s = group.now_s
    group.ask()
    for number in range(1, 20):
        group.land(1)
        assert group.step(at_s=begin_s + number) == []
    group.land(1)
    (output,) = group.step(at_s=begin_s + 20)
    assert output.num_cached_tokens == 80
    assert output.fetched is not None
    assert output.fetched.error == ""


def test_a_request_that_knows_no_speed_waits_a_fixed_time(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.ask()
    assert group.step(at_s=0.2) == []
    (output,) = group.step(at_s=0.3)
    assert output.num_cached_tokens == 0


def test_others_run_while_one_waits(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.measure()
    group.ask()
    group.engine.add_request(request("other", range_prompt(9, first=30), max_tokens=1))
    assert [output.request_id for output in group.step()] == ["other"]


def test_two_requests_for_the_same_blocks_share_a_pull(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.measure()
    group.ask("one")
    group.ask("two")
    assert len(group.pulls) == 1
    group.land(16)
    assert group.step() == []
    group.land(4)
    group.pulls[0].end()
    outputs = [*group.step(), *group.step()]
    assert {output.request_id: output.num_cached_tokens for output in outputs} == {
        "one": 80,
        "two": 80,
    }
    assert group.engine.stats().num_peer_tokens == 80


def test_a_pull_goes_on_until_nobody_waits_for_it(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.measure()
    group.ask("one")
    group.ask("two")
    group.engine.abort("one")
    assert not group.pulls[0].is_cancelled
    group.engine.abort("two")
    assert group.pulls[0].is_cancelled
    assert group.engine.has_work  # The fetcher may still write to a slot.
    group.pulls[0].end()
    group.step()
    assert not group.engine.has_work
    assert group.engine.stats().num_held_blocks == 0


def test_few_tokens_are_not_fetched(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.ask(num_blocks=7)
    assert group.pulls == []


def test_one_block_s_room_in_host_memory_is_enough(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.measure()
    transfers = group.engine.transfers
    assert transfers is not None
    taken = transfers.host_tier.take(transfers.host_tier.num_free - 1)
    group.ask()
    for number in range(20):
        group.land(1)
        assert group.pulls[0].next_slot(0) is None
        outputs = [*group.step(), *([] if number == 19 else group.step())]
    (output,) = outputs or group.step()
    assert output.num_cached_tokens == 80
    transfers.host_tier.give_back(taken)


def test_running_requests_get_the_room_of_those_that_wait(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=25)
    group.measure()
    group.ask()
    group.land(11)
    group.step()
    assert group.engine.stats().num_held_blocks == 11
    group.engine.add_request(request("other", range_prompt(81, first=30), max_tokens=12))
    outputs = group.step() + group.step()
    assert {output.request_id for output in outputs} == {"other"}
    assert group.pulls[0].is_cancelled


def take_in(engine: GroupEngine, names: BlockHashes) -> None:
    source = PeerSource(group_id="other", address="", num_blocks=len(names))
    engine.take_in(names, [None, *list(names)[:-1]], source)


def names_of(engine: GroupEngine) -> BlockHashes:
    return BlockHashes.of(engine._intake.sequence(request("x", PROMPT), 1).hashes)


def test_blocks_are_taken_in_without_a_request(rig: Callable[..., Rig]) -> None:
    group = rig()
    take_in(group.engine, names_of(group.engine))
    group.land(16)
    group.step()
    group.land(4)
    group.pulls[0].end()
    group.step()
    ended = run(group.engine, request("r", PROMPT, max_tokens=1))
    assert ended["r"].num_cached_tokens == 80
    assert group.engine.stats().num_held_blocks == 0


def test_nothing_is_evicted_for_blocks_that_nobody_waits_for(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=25)
    group.measure()
    assert group.engine.stats().num_cached_blocks == 20
    take_in(group.engine, names_of(group.engine))
    group.land(16)
    group.step()
    assert group.engine.stats().num_free_blocks == 0
    assert group.engine.stats().num_cached_blocks == 25
    assert group.pulls[0].is_cancelled
    group.pulls[0].end("it was not wanted")
    again = run(group.engine, request("again", range_prompt(81, first=7), max_tokens=1))
    assert again["again"].num_cached_tokens == 80


def test_a_long_prefix_in_host_memory_is_checked_beside_others(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.parts.tiers.checker._AT_ONCE_BYTES", 5 * BLOCK_BYTES)
    group = rig(num_blocks=25, kv_offloading_size=30 * BLOCK_BYTES / 2**30)
    run(group.engine, request("first", PROMPT, max_tokens=1))
    run(group.engine, request("next", range_prompt(81, first=30), max_tokens=1))
    transfers = group.engine.transfers
    assert transfers is not None
    names = names_of(group.engine)
    slots = transfers.match(names[len(group.engine._pool.match(names)) :])
    assert len(slots) > 6
    may_go_on = threading.Event()
    transfers.checker._reader.submit(may_go_on.wait)
    group.engine.add_request(request("again", PROMPT, max_tokens=1))
    group.engine.add_request(request("other", range_prompt(9, first=20), max_tokens=1))
    assert [output.request_id for output in group.step()] == ["other"]
    transfers.host_blocks_XC[slots[2], 0] ^= 1
    may_go_on.set()
    ended: list[TokenDelta] = []
    while not ended:
        ended = group.step()
    num_here = len(names) - len(slots)
    assert ended[0].num_cached_tokens == (num_here + 2) * SIZE
    assert ended[0].fetched is not None
    assert ended[0].fetched.num_host_tokens > 0
    assert group.engine.stats().num_corrupt_blocks == 1


def test_a_check_that_nobody_waits_for_is_given_up(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.worker.parts.tiers.checker._AT_ONCE_BYTES", 0)
    group = rig(num_blocks=25, kv_offloading_size=30 * BLOCK_BYTES / 2**30)
    run(group.engine, request("first", PROMPT, max_tokens=1))
    run(group.engine, request("next", range_prompt(81, first=30), max_tokens=1))
    group.engine.add_request(request("again", PROMPT, max_tokens=1))
    assert group.engine.abort("again")
    transfers = group.engine.transfers
    assert transfers is not None
    assert not any(transfers.host_tier._pins)
    assert not group.engine.has_work
