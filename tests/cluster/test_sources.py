"""The source of blocks that a gateway names to a group with each attempt, and its explanation."""

from typing import Any

import pytest
from tests.cluster.completions import Attempts, parts_of
from tests.cluster.test_attempts import CONFIG, EPOCH
from tests.prepared import prepared
from tests.sim.loop import SimLoop, simulate

from quire.cluster.errors import Death, GroupDied, HandedOver
from quire.cluster.features.explain.command import detailed
from quire.cluster.features.explain.explanations import Explanations
from quire.cluster.gateway.losses import Blame
from quire.cluster.gateway.pipeline import CompletionPipeline
from quire.cluster.links.group_link import GroupContact
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb
from quire.v1 import inference_pb2
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.request.outputs import Fetched

A, B, C = GroupId("a"), GroupId("b"), GroupId("c")
NUM_PROMPT_TOKENS = 999
FORMAT = pb.KvFormat(num_layers=2, num_kv_heads=1, head_bytes=64, block_size=4)
OTHER_FORMAT = pb.KvFormat(num_layers=2, num_kv_heads=1, head_bytes=32, block_size=4)
BLOCKS = tuple(BlockHash(bytes([1, i % 256, i // 256]) + bytes(29)) for i in range(249))


class Client:
    def __init__(self, name: str, format: pb.KvFormat | None) -> None:
        self.address = f"{name}:1"
        self.is_attached = True
        self.num_unsent_commands = 0
        self.adapters: set[str] = set()
        self.description = pb.GroupDescription(group_id=name, epoch=EPOCH, model="m", block_size=4)
        if format is not None:
            self.description.kv_format.CopyFrom(format)
        self.submits: list[pb.Submit] = []

    def submit(self, submit: pb.Submit, **_: Any) -> GroupStream:
        self.submits.append(submit)
        return GroupStream(
            submit, window=8, on_abort=lambda _: None, on_credit=lambda *_: None, epoch=EPOCH
        )


class Scene:
    """A gateway with three groups; ``formats`` gives each one's format for exchanged blocks."""

    def __init__(self, loop: SimLoop, formats: dict[GroupId, pb.KvFormat | None]) -> None:
        self.table = RoutingTable(block_size=4, clock=loop.time)
        contacts = {
            f"{name}:1": GroupContact(address=f"{name}:1", token=f"of {name}", certificate="PEM")
            for name in formats
        }
        self.groups = Groups(
            table=self.table, expected=Expectation(model="m", block_size=4), contacts=contacts
        )
        self.clients: dict[GroupId, Any] = {n: Client(n, each) for n, each in formats.items()}
        for client in self.clients.values():
            self.groups.attached(client)
        parts = parts_of(self.groups, self.table, config=CONFIG, clock=loop.time)
        request = prepared(
            "r",
            range(NUM_PROMPT_TOKENS),
            hashes=BlockHashes.of(BLOCKS),
            model=self.groups.card,
            seed=1,
            max_tokens=9,
        )
        self.attempts = Attempts(request, parts, CompletionPipeline(parts), blame=Blame())

    async def begin(self, token_ids: list[int]) -> tuple[GroupId, pb.Submit]:
        await self.attempts.begin(token_ids)
        group = self.attempts.one.decision.group
        return group, self.clients[group].submits[-1]

    def bring(self, num_tokens: int) -> None:
        stream = self.attempts.one.stream
        assert stream is not None
        assert stream.push(pb.TokenDelta(token_offset=0, token_ids=range(num_tokens)))

    def load(self, group: GroupId, pending: int) -> None:
        load = GroupLoad(num_running=0, num_waiting=0, num_pending_prefill_tokens=pending)
        self.table.update_load(group, load)


def exchanging(*groups: GroupId) -> dict[GroupId, pb.KvFormat | None]:
    return {group: FORMAT if group in groups else None for group in (A, B, C)}


async def handed_over(scene: Scene, *, num_tokens: int) -> tuple[GroupId, GroupId, pb.Submit]:
    former, first = await scene.begin([])
    assert not first.HasField("source")
    scene.bring(num_tokens)
    scene.groups.turned_away(scene.clients[former])
    scene.attempts.lose(HandedOver("it drains"))
    taker, submit = await scene.begin(list(range(num_tokens)))
    await scene.groups.close()
    return former, taker, submit


def test_who_takes_a_request_over_is_told_the_group_that_hands_it_over() -> None:
    """Names all blocks of prompt and output, without the last token, which no group has computed:
    (999 + 6 - 1) // 4."""

    async def main(loop: SimLoop) -> None:
        scene = Scene(loop, exchanging(A, B, C))
        former, taker, submit = await handed_over(scene, num_tokens=6)
        assert taker != former
        assert submit.source == pb.BlockSource(
            group_id=former,
            address=f"{former}:1",
            token=f"of {former}",
            certificate="PEM",
            num_blocks=251,
        )
        assert scene.attempts.one.decision.source == former
        assert scene.attempts.one.decision.num_fetched_tokens == 4 * 251

    simulate(main, seed=1)


@pytest.mark.parametrize("changed", [None, OTHER_FORMAT])
def test_nobody_is_sent_to_a_group_with_which_it_does_not_exchange_blocks(
    changed: pb.KvFormat | None,
) -> None:
    async def main(loop: SimLoop) -> None:
        scene = Scene(loop, exchanging(A, B, C))
        former, _ = await scene.begin([])
        description = scene.clients[former].description
        description.ClearField("kv_format")
        if changed is not None:
            description.kv_format.CopyFrom(changed)
        scene.bring(6)
        scene.groups.turned_away(scene.clients[former])
        scene.attempts.lose(HandedOver("it drains"))
        _, submit = await scene.begin(list(range(6)))
        assert not submit.HasField("source")
        await scene.groups.close()

    simulate(main, seed=1)


def test_a_group_that_is_gone_is_no_source() -> None:
    async def main(loop: SimLoop) -> None:
        scene = Scene(loop, exchanging(A, B, C))
        former, _ = await scene.begin([])
        scene.bring(6)
        scene.groups.detached(scene.clients[former])
        scene.attempts.lose(GroupDied("gone", Death(former, EPOCH)))
        _, submit = await scene.begin(list(range(6)))
        assert not submit.HasField("source")
        await scene.groups.close()

    simulate(main, seed=1)


def test_a_group_that_never_began_it_is_no_source() -> None:
    async def main(loop: SimLoop) -> None:
        scene = Scene(loop, exchanging(A, B, C))
        _, _, submit = await handed_over(scene, num_tokens=0)
        assert not submit.HasField("source")

    simulate(main, seed=1)


def test_where_the_policy_fetches_the_group_is_told_from_whom_and_so_are_those_who_ask() -> None:
    async def main(loop: SimLoop) -> None:
        scene = Scene(loop, exchanging(A, B))
        stored = (BlocksStored(BLOCKS),)
        scene.table.apply_events(A, EventBatch(epoch=EPOCH, first_seq=0, events=stored))
        scene.load(A, 50_000)
        scene.load(C, 50_000)
        group, submit = await scene.begin([])
        assert (group, submit.source.group_id, submit.source.num_blocks) == (B, A, 249)
        fetched = Fetched(num_peer_tokens=996, wait_s=0.25, error="")
        scene.table.started("r-0", num_cached_tokens=996, fetched=fetched)
        answer = await Explanations(lambda: [scene.table]).answer(
            inference_pb2.ExplainRoutingRequest(request_id="r"), tenant=None
        )
        await scene.groups.close()
        (told,) = answer.decisions
        assert (told.routing.source, told.routing.num_fetched_tokens) == (A, 996)
        assert told.routing.predicted_cached_tokens == told.num_cached_tokens == 996
        assert (told.fetched.num_peer_tokens, told.fetched.wait_s) == (996, 0.25)
        page = detailed(told)
        assert "of these to fetch: 996, from a, forecast -" in page
        assert "0 from host memory, 0 from disk, 996 from another group, waited 250.0 ms" in page
        (line,) = [line for line in page.splitlines() if line.startswith("->")]
        assert line.split()[1:6] == [
            "b",
            f"{told.routing.candidates[1].cost:,.0f}",
            "0",
            "996",
            "3",
        ]

    simulate(main, seed=1)


def test_why_a_source_brought_no_more_is_shown() -> None:
    told = inference_pb2.RoutingDecision(
        fetched=inference_pb2.RoutingFetched(num_host_tokens=32, error="the lease is over")
    )
    page = detailed(told)
    assert "32 from host memory" in page
    assert page.count("from its source it got no more: the lease is over") == 1
