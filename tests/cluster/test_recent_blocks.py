"""Which blocks of a prompt a gateway knows to be on their way, and what admission makes of it."""

import pytest

from quire.cluster.errors import Overloaded
from quire.cluster.serving.admission import Admission
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.recent import RecentBlocks
from quire.cluster.serving.ticket import Ticket
from quire.router.policies.policy import GroupState
from quire.router.prefix_index.directory import GroupId
from quire.v1 import group_pb2 as pb
from quire.worker.api.hashing import BlockHashes


def hashes(*numbers: int) -> BlockHashes:
    return BlockHashes(b"".join(number.to_bytes(32, "little") for number in numbers))


def test_the_first_blocks_of_admitted_prompts_are_known() -> None:
    recent = RecentBlocks()
    recent.add([hashes(1, 2, 3)], now_s=0)
    prompts = [hashes(1, 2, 3, 4), hashes(1, 2, 5), hashes(6, 7), hashes()]
    assert recent.num_known(prompts, now_s=0) == [3, 2, 0, 0]
    assert RecentBlocks().num_known([hashes(1, 2)], now_s=0) == [0]


def test_prompts_of_one_request_share_their_blocks() -> None:
    prompts = [hashes(1, 2), hashes(1, 3), hashes(1, 2)]
    assert RecentBlocks().num_known(prompts, now_s=0) == [0, 1, 2]


def test_what_was_admitted_long_ago_is_forgotten() -> None:
    recent = RecentBlocks()
    recent.add([hashes(1)], now_s=0)
    recent.add([hashes(2)], now_s=6)
    assert recent.num_known([hashes(1), hashes(2)], now_s=9) == [1, 1]
    assert recent.num_known([hashes(1), hashes(2)], now_s=11) == [0, 1]
    assert recent.num_known([hashes(1), hashes(2)], now_s=100) == [0, 0]
    assert len(recent) == 0


def test_many_prompts_take_a_bounded_place() -> None:
    recent = RecentBlocks(max_blocks=10)
    for first in range(0, 1000, 4):
        recent.add([hashes(*range(first, first + 4))], now_s=0)
        assert len(recent) <= 2 * (10 + 3)
    assert recent.num_known([hashes(996, 997), hashes(0)], now_s=0) == [2, 0]


STATE = GroupState(group=GroupId("g"), num_running=1, num_pending_prefill_tokens=1)


def admission(num_slots: int) -> Admission:
    """At a group that has shown no speed, for which 16,384 tokens a second are assumed."""
    capacity = Capacity()
    described = pb.GroupDescription(group_id="g", epoch=1, max_num_seqs=num_slots)
    capacity.observe(described, pb.Load(), now_s=0)
    return Admission(AdmissionConfig(max_queue_wait_s=1.0), capacity)


def taken(queue: Admission, *, num_known_tokens: int = 0) -> tuple[int, Overloaded]:
    """How many of equal requests of 1,000 tokens are taken, and what the next one is told."""
    for number in range(1000):
        ticket = Ticket(num_prompt_tokens=1000, num_known_tokens=num_known_tokens)
        try:
            queue.offer(ticket, [STATE], now_s=0)
        except Overloaded as error:
            return number, error
    raise AssertionError("all were taken")


@pytest.mark.parametrize(("num_known_tokens", "expected"), [(0, 17), (900, 164)])
def test_tokens_that_are_known_count_for_nothing(num_known_tokens: int, expected: int) -> None:
    queue = admission(1000)
    assert taken(queue, num_known_tokens=num_known_tokens)[0] == pytest.approx(expected, abs=1)
