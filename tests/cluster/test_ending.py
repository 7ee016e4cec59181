"""Errors and log entries of completions that did not end normally."""

from typing import Any

import pytest
from tests.cluster.completions import completion_of, parts_of
from tests.prepared import prepared

from quire.cluster.errors import Unavailable
from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.gateway.pipeline import CompletionPipeline
from quire.cluster.gateway.record import why_cancelled
from quire.cluster.gateway.work import Work
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.worker.request.errors import InvalidRequest, QueueFull, QuireError
from quire.worker.request.model_card import ModelCard

pytestmark = pytest.mark.anyio

LOST = QuireError("g0 died")


def asked(*, is_failed: bool = False, **times_s: float) -> Work:
    return Work(requests=[prepared("r", [1], **times_s)], is_failed=is_failed)


@pytest.mark.parametrize(
    ("work", "now_s", "lost", "told"),
    [
        (asked(), 1e9, None, ("cancelled", "")),
        (asked(arrival_s=100, deadline_s=110), 105, None, ("cancelled", "")),
        (asked(arrival_s=100, deadline_s=110), 110, None, ("deadline", "passed before the end")),
        # A gRPC client with 1.001 s left sends 1.01 s, and cancels when its own time is over.
        (asked(arrival_s=100, deadline_s=101.01), 101.0, None, ("deadline", "passed before the")),
        (asked(deadline_s=10), 3, LOST, ("cancelled", "while it waited for another group (g0 d")),
        (asked(deadline_s=10), 12, LOST, ("deadline", "passed while it waited for another group")),
        (asked(deadline_s=10, is_failed=True), 12, None, ("cancelled", "another completion of t")),
    ],
)
def test_what_is_closed_is_told_by_whom(
    work: Work, now_s: float, lost: QuireError | None, told: tuple[str, str]
) -> None:
    outcome, detail = why_cancelled(work, now_s=now_s, lost=lost)
    assert outcome == told[0]
    assert detail.startswith(told[1])
    assert bool(detail) == bool(told[1])


class Refusing(Groups):
    """Groups that answer each request with ``error``, and disappear if ``are_gone``."""

    error: group_pb2.GroupError
    are_gone = False

    def submit(self, group_id: GroupId, submit: group_pb2.Submit, **_: Any) -> GroupStream:
        stream = GroupStream(
            submit, window=8, on_abort=lambda _: None, on_credit=lambda *_: None, epoch=1
        )
        stream.push(group_pb2.TokenDelta(error=self.error))
        if self.are_gone:
            self._table.update_members([])
        return stream


@pytest.mark.parametrize(
    ("code", "are_gone", "raised", "outcomes"),
    [
        ("INVALID_REQUEST", False, InvalidRequest, ["error: by the group"]),
        ("QUEUE_FULL", False, QueueFull, ["moved: by the group", "error: by the group"]),
        # Without another group, it has not moved.
        ("GROUP_FAILED", True, Unavailable, ["error: no replica group can take the request after"]),
    ],
)
async def test_what_failed_is_told_with_why_at_its_last_attempt(
    code: str, are_gone: bool, raised: type[Exception], outcomes: list[str], model: Any
) -> None:
    table = RoutingTable(block_size=4)
    groups = Refusing(table=table, expected=Expectation(model="m", block_size=4))
    groups.error = group_pb2.GroupError(code=code, message="by the group")
    groups.are_gone = are_gone
    table.update_members([GroupId("a"), GroupId("b")])
    card = ModelCard.of(group_pb2.GroupDescription(model="m", block_size=4))
    request = prepared("r", range(5), model=card, seed=1, max_tokens=2)
    config = CompletionConfig(group_wait_s=0)
    parts = parts_of(groups, table, tokenizer=model.tokenizer, config=config)
    completion = completion_of(request, parts)

    async def take(chunk: object) -> None:
        pass

    with pytest.raises(raised):
        await CompletionPipeline(parts).run(completion, take)
    await groups.close()
    told = [each.outcome for each in table.explain("r")]
    assert len(told) == len(outcomes)
    assert all(map(str.startswith, told, outcomes)), told
    assert "by the group" in told[-1]
    assert completion.work.is_failed, "its siblings are told"
