"""A completion whose groups send invalid messages."""

import asyncio
from typing import Any

import pytest
from tests.cluster.completions import completion_of, parts_of
from tests.prepared import prepared

from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.pipeline import CompletionPipeline
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.config import RoutingConfig
from quire.router.prefix_index.directory import GroupId
from quire.router.stages import Stages
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.request.model_card import ModelCard

pytestmark = pytest.mark.anyio


class Scripted(Groups):
    """Groups that answer each attempt with the next of ``answers``."""

    answers: list[group_pb2.TokenDelta]
    then: list[str] | None = None
    """The members from the first submission on, if they change."""
    submitted: list[tuple[int, int]]
    """Each attempt's resumed tokens, and after how many more the group hands it over."""

    def submit(self, group_id: GroupId, submit: group_pb2.Submit, **_: Any) -> GroupStream:
        self.submitted.append((len(submit.resumed_token_ids) // 4, submit.hand_over_after))
        if self.then is not None:
            self._table.update_members(map(GroupId, self.then))
        stream = GroupStream(
            submit, window=8, on_abort=lambda _: None, on_credit=lambda *_: None, epoch=1
        )
        stream.push(self.answers.pop(0))
        return stream


class Scene:
    """One completion on scripted groups."""

    def __init__(self, model: Any, members: list[str], *, num_prefill_groups: int = 0) -> None:
        self.table = RoutingTable(
            block_size=4, config=RoutingConfig(num_prefill_groups=num_prefill_groups)
        )
        self.groups = Scripted(table=self.table, expected=Expectation(model="m", block_size=4))
        self.groups.submitted = []
        self.table.update_members(map(GroupId, members))
        self._parts = parts_of(self.groups, self.table, tokenizer=model.tokenizer)
        self.telemetry = self._parts.telemetry

    async def run(self, *, num_prompt_tokens: int, max_tokens: int) -> tuple[list[int], str | None]:
        """Its tokens and finish reason."""
        card = ModelCard.of(group_pb2.GroupDescription(model="m", block_size=4))
        prompt = [number % 5 for number in range(num_prompt_tokens)]
        request = prepared("r", prompt, model=card, seed=1, max_tokens=max_tokens)
        completion = completion_of(request, self._parts)
        chunks: list[Chunk] = []

        async def take(chunk: Chunk) -> None:
            chunks.append(chunk)

        async with asyncio.timeout(120):
            await CompletionPipeline(self._parts).run(completion, take)
        await self.groups.close()
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return tokens, chunks[-1].finish_reason


async def test_a_group_that_aborts_what_nobody_aborted_is_left_for_another(
    model: Any,
) -> None:
    scene = Scene(model, ["a", "b"])
    scene.groups.answers = [
        group_pb2.TokenDelta(token_ids=[1], finish_reason=pb.FINISH_REASON_ABORT),
        group_pb2.TokenDelta(token_ids=model.letters[:2], finish_reason=pb.FINISH_REASON_LENGTH),
    ]
    answer = await scene.run(num_prompt_tokens=5, max_tokens=2)
    assert answer == (model.letters[:2], "length")
    assert scene.telemetry.completions.labels("length")._value.get() == 1
    assert scene.telemetry.resumes._value.get() == 1


def roles() -> tuple[str, str]:
    """Names of a group that only prefills beside the other, and of that one."""
    stages = Stages(num_prefill_groups=1)
    stages.update(map(GroupId, "ab"))
    return min(stages.prefill), min(stages.decode)


async def test_a_group_that_prefills_no_more_still_hands_over_what_it_was_told_to(
    model: Any,
) -> None:
    prefill, decode = roles()
    scene = Scene(model, [prefill, decode], num_prefill_groups=1)
    scene.groups.then = [prefill]
    tokens = model.letters[:3]
    scene.groups.answers = [
        group_pb2.TokenDelta(token_ids=tokens[:1], finish_reason=pb.FINISH_REASON_LENGTH),
        group_pb2.TokenDelta(
            token_offset=1, token_ids=tokens[1:], finish_reason=pb.FINISH_REASON_LENGTH
        ),
    ]
    assert await scene.run(num_prompt_tokens=300, max_tokens=3) == (tokens, "length")
    assert scene.groups.submitted == [(0, 1), (1, 0)]
    assert scene.telemetry.handovers._value.get() == 1


async def test_a_group_that_has_come_to_prefill_still_ends_what_it_was_told_to_end(
    model: Any,
) -> None:
    prefill, decode = roles()
    scene = Scene(model, [prefill], num_prefill_groups=1)
    scene.groups.then = [prefill, decode]
    tokens = model.letters[:3]
    scene.groups.answers = [
        group_pb2.TokenDelta(token_ids=tokens, finish_reason=pb.FINISH_REASON_LENGTH)
    ]
    assert await scene.run(num_prompt_tokens=300, max_tokens=3) == (tokens, "length")
    assert scene.groups.submitted == [(0, 0)]
    assert scene.telemetry.handovers._value.get() == 0
