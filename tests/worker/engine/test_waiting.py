"""The waiting queue against a list that is sorted at each call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prepared import prepared

from quire.worker.blocks.hashing import BlockHash
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.waiting import AGING, Turn, WaitingQueue, turn_of


def make_sequence(number: int, *, priority: int = 0) -> Sequence:
    seq = Sequence(
        prepared(str(number), [1, 2, 3], priority=priority),
        seed=0,
        max_tokens=1,
        eos_token_ids=(),
        block_size=4,
        chain=None,
    )
    seq.number = number
    return seq


SEQUENCES = [make_sequence(n) for n in range(6)]
OPERATIONS = st.tuples(
    st.sampled_from(["push", "push", "remove"]), st.integers(0, 5), st.integers(0, 3)
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "push", "remove", "computed", "take"]),
            st.integers(0, 5),
            st.sampled_from([None, b"a", b"b", b"c"]),
        ),
        max_size=60,
    )
)
def test_who_lacks_what_is_known_in_order(
    operations: list[tuple[str, int, bytes | None]],
) -> None:
    queue, model, outdated = WaitingQueue(), dict[Sequence, bytes | None](), list[Sequence]()
    for operation, number, block in operations:
        seq, lacks = SEQUENCES[number], None if block is None else BlockHash(block)
        if operation == "push":
            if seq in outdated:
                outdated.remove(seq)
            if model.get(seq, b"") != block:
                model.pop(seq, None)
            model.setdefault(seq, block)
            queue.push(seq, (0, 0.0, number), lacks=lacks)
        elif operation == "computed" and lacks is not None:
            queue.computed(lacks)
            outdated += [each for each in model if model[each] == block]
            model = {each: None if other == block else other for each, other in model.items()}
        elif operation == "take":
            assert queue.take_outdated(number) == outdated[:number]
            outdated = outdated[number:]
        elif operation == "remove" and seq in model:
            del model[seq]
            queue.remove(seq)
            outdated = [each for each in outdated if each is not seq]
        assert len(queue) == len(model)
        for name in (b"a", b"b", b"c"):
            same = [each for each in model if model[each] == name]
            assert queue.num_lacking(BlockHash(name)) == len(same)
            assert queue.first_lacking(BlockHash(name)) == (same[0] if same else None)
        assert queue.num_lacking(None) == 0
        assert queue.first_lacking(None) is None


@given(st.lists(OPERATIONS, max_size=120))
def test_the_head_is_the_least_turn(
    operations: list[tuple[str, int, int]],
) -> None:
    queue, model = WaitingQueue(), dict[Sequence, Turn]()
    for operation, number, key in operations:
        seq = SEQUENCES[number]
        if operation == "push":
            model[seq] = (0, float(key), number)
            queue.push(seq, model[seq])
        elif seq in model:
            del model[seq]
            queue.remove(seq)
        assert len(queue) == len(model)
        if model:
            head = min(model, key=lambda seq: model[seq])
            assert queue.head() == (model[head], head)


def test_the_queue_keeps_no_more_than_a_few_times_what_waits() -> None:
    queue = WaitingQueue()
    for _ in range(1_000):
        for seq in SEQUENCES:
            queue.push(seq, (0, 0.0, seq.number))
        for seq in SEQUENCES[1:]:
            queue.remove(seq)
    assert len(queue._in_turn) < 100


def test_a_turn_is_priority_then_what_is_left_less_age_then_arrival() -> None:
    early, late = make_sequence(1), make_sequence(2)
    late.arrived_at_token = 1_000
    gained = 1_000 * AGING
    assert turn_of(early, 100 + int(gained) - 1, "shortest_prefill") < turn_of(
        late, 100, "shortest_prefill"
    )
    assert turn_of(late, 100, "shortest_prefill") < turn_of(
        early, 100 + int(gained) + 1, "shortest_prefill"
    )
    assert turn_of(early, 10_000, "fcfs") < turn_of(late, 1, "fcfs")
    urgent = make_sequence(3, priority=-1)
    for policy in ("fcfs", "shortest_prefill"):
        assert turn_of(urgent, 10_000, policy) < turn_of(early, 1, policy)
    assert turn_of(early, 5, "fcfs") == pytest.approx((0, 0.0, 1))
