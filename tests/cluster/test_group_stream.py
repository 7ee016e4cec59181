from typing import Any

import pytest

from quire.cluster.errors import GroupLost
from quire.cluster.links.group_stream import GroupStream, Turns
from quire.cluster.wire import tokens_to_bytes
from quire.v1 import group_pb2 as pb
from quire.v1 import inference_pb2

pytestmark = pytest.mark.anyio

WINDOW = 8


class Wire:
    """A `GroupStream`, and its messages to the group."""

    def __init__(
        self,
        *,
        num_resumed: int = 0,
        isolated_tokens: int = 0,
        attempt: int = 1,
        turns: Turns | None = None,
    ) -> None:
        self.submit = pb.Submit(
            request_id="r",
            attempt=attempt,
            resumed_token_ids=tokens_to_bytes([5] * num_resumed),
            isolated_tokens=isolated_tokens,
        )
        self.credits: list[int] = []
        self.num_cleared = 0
        self.stream = GroupStream(
            self.submit,
            window=WINDOW,
            on_abort=lambda stream: None,
            on_credit=lambda stream, limit: self.credits.append(limit),
            on_cleared=self._clear,
            turns=turns,
        )

    def _clear(self) -> None:
        self.num_cleared += 1

    def push(self, offset: int, *token_ids: int, **fields: Any) -> bool:
        return self.stream.push(pb.TokenDelta(token_offset=offset, token_ids=token_ids, **fields))


def tokens(deltas: list[pb.TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_what_comes_a_second_time_is_dropped() -> None:
    wire = Wire(num_resumed=3)
    assert wire.push(3, 10, 11)
    assert wire.push(4, 11)
    assert wire.push(3, 10, 11)
    assert wire.push(0, 5, 5)
    assert wire.push(5, 12, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
    assert tokens(await wire.stream.next()) == [10, 11, 12]
    assert wire.stream.num_tokens == 3


@pytest.mark.parametrize(("offset", "num"), [(3, 1), (1, 4), (9, 0)])
async def test_a_gap_or_an_overlap_loses_the_stream_behind_what_was_good(
    offset: int, num: int
) -> None:
    wire = Wire()
    wire.push(0, 10, 11)
    assert not wire.push(offset, *[12] * num)
    assert tokens(await wire.stream.next()) == [10, 11]
    with pytest.raises(GroupLost, match=f"sent token {offset}, expected 2"):
        await wire.stream.next()


async def test_more_than_there_is_credit_for_is_not_taken() -> None:
    wire = Wire(num_resumed=2)
    assert wire.submit.token_limit == 2 + WINDOW
    assert wire.push(2, *range(WINDOW))
    assert not wire.stream.is_owed
    assert not wire.push(2 + WINDOW, 1)
    assert wire.stream.num_buffered == WINDOW


async def test_credit_comes_as_the_reader_goes_on_and_not_before() -> None:
    wire = Wire()
    wire.push(0, *range(WINDOW))
    await wire.stream.next()
    assert wire.credits == [], "what was taken is still in the reader's hands"
    assert wire.stream.num_buffered == WINDOW
    wire.stream.lose(GroupLost("end"))
    with pytest.raises(GroupLost):
        await wire.stream.next()
    assert wire.credits == [2 * WINDOW]
    assert wire.stream.num_buffered == 0


async def test_a_steady_reader_gives_credit_twice_a_window() -> None:
    wire = Wire()
    for position in range(10 * WINDOW):
        assert wire.push(position, 1)
        await wire.stream.next()
    assert len(wire.credits) <= 2 * 10
    assert wire.stream.is_owed


@pytest.mark.parametrize("how", ["tokens", "end"])
async def test_an_isolated_request_is_cleared_by_tokens_or_its_end_read_or_not(how: str) -> None:
    wire = Wire(num_resumed=2, isolated_tokens=3)
    wire.push(2, 1, 1)
    assert wire.num_cleared == 0
    if how == "tokens":
        wire.push(4, 1)
        wire.push(5, 1)
    else:
        wire.push(4, finish_reason=inference_pb2.FINISH_REASON_STOP)
    assert wire.num_cleared == 1


async def test_a_later_attempt_may_have_begun_once_it_is_acknowledged() -> None:
    assert Wire().stream.may_have_begun, "a first attempt is begun without further ado"
    wire = Wire(num_resumed=2, isolated_tokens=1, attempt=2)
    assert not wire.stream.may_have_begun
    assert wire.push(2)
    assert wire.stream.may_have_begun
    assert wire.num_cleared == 0
    assert wire.push(2, 7)
    assert [len(delta.token_ids) for delta in await wire.stream.next()] == [1], "it is no output"


async def test_what_comes_before_its_turn_is_taken_with_the_rest() -> None:
    turns = Turns(per_turn=1)
    wire = Wire(turns=turns)

    def other_stream() -> None:  # It is before it.
        wire.push(2, 12)

    turns.soon(other_stream)
    wire.push(0, 10, 11)
    assert tokens(await wire.stream.next()) == [10, 11, 12]
