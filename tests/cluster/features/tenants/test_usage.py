"""The usage ledger counts the work that groups do, however calls and groups end."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from tests.examples import examples
from tests.prepared import prepared

from quire.cluster.errors import GroupLost
from quire.cluster.features.tenants.limits import TenantPolicy, Tenants
from quire.cluster.features.tenants.usage import UsageLedger
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.service import ModelService
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import QuireError
from quire.worker.request.model_card import ModelCard

pytestmark = pytest.mark.anyio

BUDGET = 10**9
"""Tokens per minute of each tenant: more than all calls use."""


class Engines(Groups):
    """Groups that refuse, die or generate as ``rng`` says, and count their own work.

    ``prompts`` has the prompts that they began, by request, and ``cached`` the cached tokens of
    the completions that got a token. An attempt that is aborted before its first token was begun;
    one that is refused or lost before it was not.
    """

    rng: random.Random
    token_ids: list[int]

    def count(self) -> None:
        self.prompts = set[str]()
        self.cached: dict[str, int] = {}
        self.num_output: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()

    def submit(self, group_id: GroupId, submit: group_pb2.Submit, **_: Any) -> GroupStream:
        stream = GroupStream(
            submit,
            window=64,
            on_abort=lambda _: self._aborted(submit, task),
            on_credit=lambda *_: None,
            epoch=1,
        )
        task = asyncio.create_task(self._run(submit, stream))
        self.tasks.add(task)
        return stream

    def _aborted(self, submit: group_pb2.Submit, task: asyncio.Task[None]) -> None:
        if not task.done():  # The client left, or another completion of its request failed.
            self.prompts.add(submit.request_id.split("-")[0])
            task.cancel()

    async def _run(self, submit: group_pb2.Submit, stream: GroupStream) -> None:
        name, rng = submit.request_id, self.rng
        offset = len(submit.resumed_token_ids) // 4
        await self._pause()
        if rng.random() < 0.3:
            code = group_pb2.GroupError.QUEUE_FULL
            error = group_pb2.GroupError(code=code, message="full")
            stream.push(group_pb2.TokenDelta(token_offset=offset, error=error))
            return
        num_cached = rng.randrange(5)
        while True:
            if rng.random() < 0.03:
                stream.lose(GroupLost("the group died"))
                return
            num = rng.randrange(1, 4)
            is_last = offset + num >= 8
            if not self.num_output[name]:
                self.cached.setdefault(name, num_cached)
            self.prompts.add(name.split("-")[0])
            self.num_output[name] += num
            stream.push(
                group_pb2.TokenDelta(
                    token_offset=offset,
                    token_ids=rng.choices(self.token_ids, k=num),
                    num_cached_tokens=num_cached,
                    finish_reason=pb.FINISH_REASON_LENGTH if is_last else None,
                )
            )
            if is_last:
                return
            offset += num
            await self._pause()

    async def _pause(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)


async def test_the_ledger_equals_the_engines_own_counts(model: Any) -> None:
    """Calls of several prompts and choices, whose clients may leave, whose deadlines pass, and
    whose groups refuse and die; also those whose answer shows no output, as scores' do."""
    rng = random.Random(7)
    table = RoutingTable(block_size=4)
    groups = Engines(table=table, expected=Expectation(model="m", block_size=4))
    groups.rng, groups.token_ids = rng, model.letters[:8]
    groups.count()
    table.update_members([GroupId("a"), GroupId("b"), GroupId("c")])
    service = ModelService(model="m", tokenizer=model.tokenizer, groups=groups, table=table)
    service.admission._admission._can_begin = lambda *_: True  # type: ignore[method-assign]
    ledger = UsageLedger()
    policy = TenantPolicy(tokens_per_minute=BUDGET)
    tenants = Tenants({"t0": policy, "t1": policy}, clock=lambda: 0.0)
    service.meter.share(tenants, ledger)
    card = ModelCard.of(group_pb2.GroupDescription(model="m", block_size=4))
    expected: dict[str, Counter[str]] = {"t0": Counter(), "t1": Counter()}
    num_charged: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()

    async def take(chunk: Chunk) -> None:
        await asyncio.sleep(0)

    for call in range(examples(1000)):
        tenant, n, shows_output = f"t{call % 2}", rng.randrange(1, 4), rng.random() < 0.8
        requests = [
            prepared(
                f"{call}.{number}",
                range(rng.randrange(1, 30)),
                model=card,
                n=n,
                max_tokens=8,
                tenant=tenant,
                deadline_s=service._clock() + rng.choice([0.0, 60.0, 60.0]),
            )
            for number in range(rng.randrange(1, 3))
        ]
        running = asyncio.ensure_future(service.run(requests, take, shows_output=shows_output))
        if rng.random() < 0.4:
            for _ in range(rng.randrange(1, 30)):
                await asyncio.sleep(0)
            running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert outcome is None or isinstance(outcome, QuireError | asyncio.CancelledError)
        outcomes[type(outcome).__name__] += 1
        began = [each for each in requests if each.request_id in groups.prompts]
        names = [f"{each.request_id}-{number}" for each in requests for number in range(n)]
        num_output = sum(groups.num_output[name] for name in names) * shows_output
        expected[tenant] += Counter(
            requests=1,
            prompt_tokens=sum(len(each.prompt_token_ids) for each in began),
            cached_tokens=sum(groups.cached.get(f"{each.request_id}-0", 0) for each in requests),
            output_tokens=num_output,
        )
        num_charged[tenant] += num_output + sum(len(each.prompt_token_ids) for each in requests)
        groups.count()
    told = {row["tenant"]: row for row in (await ledger.own(None))["data"]}
    metrics = {
        (sample.name, sample.labels["tenant"]): sample.value
        for metric in ledger.collect()
        for sample in metric.samples
    }
    for tenant, counts in expected.items():
        assert {name: told[tenant][name] for name in counts} == counts
        for name, value in counts.items():
            assert metrics[f"quire_usage_{name}_total", tenant] == value
        level = tenants._account(tenant).tokens.level
        assert level == BUDGET - num_charged[tenant]
    assert len(outcomes) == 4, "all finished, left, late and refused"
    await groups.close()
    service.close()
