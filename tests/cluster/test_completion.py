"""A completion whose groups send invalid messages."""

import asyncio
from typing import Any

import pytest
from tests.prepared import prepared

from quire.cluster.failover.chunk import Chunk
from quire.cluster.failover.completion import Completion
from quire.cluster.failover.resume import CompletionConfig
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.telemetry.metrics import Telemetry
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.api.model_card import ModelCard

pytestmark = pytest.mark.anyio


class Scripted(Groups):
    """Two groups that answer each attempt with the next of ``answers``."""

    answers: list[group_pb2.TokenDelta]

    def submit(self, group_id: GroupId, submit: group_pb2.Submit, **_: Any) -> GroupStream:
        stream = GroupStream(
            submit, window=8, on_abort=lambda _: None, on_credit=lambda *_: None, epoch=1
        )
        stream.push(self.answers.pop(0))
        return stream


async def test_a_group_that_aborts_what_nobody_aborted_is_left_for_another(
    model: Any,
) -> None:
    table = RoutingTable(block_size=4)
    groups = Scripted(table=table, expected=Expectation(model="m", block_size=4))
    table.update_members([GroupId("a"), GroupId("b")])
    groups.answers = [
        group_pb2.TokenDelta(token_ids=[1], finish_reason=pb.FINISH_REASON_ABORT),
        group_pb2.TokenDelta(token_ids=model.letters[:2], finish_reason=pb.FINISH_REASON_LENGTH),
    ]
    telemetry = Telemetry(groups=groups, table=table)
    card = ModelCard.of(group_pb2.GroupDescription(model="m", block_size=4))
    request = prepared("r", range(5), model=card, seed=1, max_tokens=2)
    completion = Completion(
        request,
        work=b"",
        groups=groups,
        table=table,
        tokenizer=model.tokenizer,
        telemetry=telemetry,
        config=CompletionConfig(),
    )
    async with asyncio.timeout(120):
        chunks: list[Chunk] = []

        async def take(chunk: Chunk) -> None:
            chunks.append(chunk)

        await completion.run(take)
    await groups.close()
    assert [token for chunk in chunks for token in chunk.token_ids] == model.letters[:2]
    assert chunks[-1].finish_reason == "length"
    assert telemetry.completions.labels("length")._value.get() == 1
    assert telemetry.resumes._value.get() == 1
