"""Errors in the block directory of a whole cluster cost time, never a token, and are corrected."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from quire.cluster.links import event_reader
from quire.cluster.wire import events_from_proto
from quire.router.prefix_index.directory import BlockDirectory
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.events import EventBatch
from quire.worker.blocks.hashing import BlockHash

pytestmark = pytest.mark.anyio

SYSTEM_PROMPT = list(range(20, 50))


def prompts(count: int) -> list[list[int]]:
    return [[*SYSTEM_PROMPT[: 10 + 5 * (i % 5)], *range(60 + i, 70 + i)] for i in range(count)]


async def generate(cluster: Any, prompt: list[int]) -> list[int]:
    params = pb.SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=params)
    return [
        token async for chunk in cluster.inference.Generate(request) for token in chunk.token_ids
    ]


async def ask_all(cluster: Any) -> None:
    asked = prompts(20)
    answers = await asyncio.gather(*(generate(cluster, prompt) for prompt in asked))
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer == cluster.model.continuation(prompt, seed=5, max_tokens=6)


def tamper(directory: BlockDirectory, names: list[BlockHash], draw: random.Random) -> None:
    """Adds and removes holders in the index at random."""
    for slot in range(2):
        for name in names:
            change = draw.choice([directory._index.add, directory._index.remove])
            change(name, slot=slot)


async def test_a_directory_that_is_wrong_changes_no_token(start_cluster: Any) -> None:
    draw = random.Random(0)
    async with start_cluster(num_blocks=60) as cluster:  # So few that blocks are evicted.
        await ask_all(cluster)
        directory = cluster.table._directory
        for _ in range(5):
            for prompt in prompts(20):
                names = list(cluster.gateway.hash_prompt([*prompt, *range(40)], ""))
                tamper(directory, names, draw)
            await ask_all(cluster)


async def test_drift_is_mended_while_the_cluster_works(start_cluster: Any) -> None:
    draw = random.Random(0)
    async with start_cluster(service={"events_heartbeat_s": 0.05}) as cluster:
        await ask_all(cluster)
        directory = cluster.table._directory
        names = [n for prompt in prompts(20) for n in cluster.gateway.hash_prompt(prompt, "")]
        tamper(directory, names, draw)
        await ask_all(cluster)
        while not _is_true(directory, cluster):  # pytest's patience is the limit.
            await asyncio.sleep(0.05)
        stats = cluster.table.stats().directory
        assert stats.num_drifted_buckets > 0
        assert stats.num_gaps == 0


async def test_lost_events_and_odd_messages_are_asked_for_again(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)

    def lossy(message: group_pb2.EventBatch) -> EventBatch:
        batch = events_from_proto(message)
        fate = draw.random()
        if fate < 0.2:
            raise ValueError("no hashes at all")
        if fate < 0.5 and batch.events:
            return replace(batch, first_seq=batch.first_seq + 1, events=batch.events[1:])
        return batch

    monkeypatch.setattr(event_reader, "events_from_proto", lossy)
    async with start_cluster(num_blocks=60) as cluster:
        directory = cluster.table._directory
        while directory.stats().num_gaps < 3:
            await ask_all(cluster)
            await generate(cluster, [draw.randrange(100)] * 30)  # Evicts other blocks.
        while not _is_true(directory, cluster):
            await asyncio.sleep(0.05)
        assert directory.stats().num_drifted_buckets == 0


async def test_what_nobody_foresaw_in_an_event_is_logged_and_the_events_go_on(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_cluster() as cluster:
        apply, failures = cluster.table.apply_events, [RuntimeError("nobody foresaw this")]

        def fail_once(group_id: str, batch: EventBatch) -> object:
            if failures and batch.events:
                raise failures.pop()
            return apply(group_id, batch)

        monkeypatch.setattr(event_reader, "_MAX_PAUSE_S", 0.05)
        monkeypatch.setattr(cluster.table, "apply_events", fail_once)
        await ask_all(cluster)
        while not _is_true(cluster.table._directory, cluster):  # pytest's patience is the limit.
            await asyncio.sleep(0.05)
    assert "nobody foresaw this" in caplog.text


def _is_true(directory: BlockDirectory, cluster: Any) -> bool:
    """Whether directory and groups agree on the holders of every block."""
    stored = {name: group.engine.events._tiers[0] for name, group in cluster.groups.items()}
    return all(
        directory.longest_prefix([block]).keys() == {g for g in stored if block in stored[g]}
        for block in set().union(*stored.values())
    ) and directory.stats().num_holdings == sum(map(len, stored.values()))
