"""A gateway's cache of checked constraints is kept by tenant."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.prepared import prepared

from quire import demo_model
from quire.cluster.gateway import constraints
from quire.cluster.gateway.constraints import Constraints
from quire.cluster.gateway.work import Take, Work
from quire.worker.request.errors import ConstraintRefused, InvalidRequest
from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

GOOD, BAD = Constraint("regex", "a+"), Constraint("regex", "(")


class FakeProcess:
    """A compiler that refuses bad constraints, and holds up slow ones until it may continue."""

    checked: list[Constraint]
    may_go_on: threading.Event

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def check(self, constraint: Constraint) -> None:
        self.checked.append(constraint)
        if constraint.text.startswith("slow"):
            assert self.may_go_on.wait(60)
        if constraint == BAD:
            raise InvalidRequest("bad")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeProcess]]:
    FakeProcess.checked, FakeProcess.may_go_on = [], threading.Event()
    monkeypatch.setattr(constraints, "GrammarProcess", FakeProcess)
    yield FakeProcess
    FakeProcess.may_go_on.set()


@pytest.fixture
def made(process: object) -> Constraints:
    tokenizer: Any = None
    return Constraints(tokenizer, max_waiting=100, refused=lambda: None)


async def test_no_tenant_learns_from_an_answers_time_what_another_one_sent(
    made: Constraints, process: type[FakeProcess]
) -> None:
    for _ in range(2):
        for tenant in ("A", "B"):
            await made.check(GOOD, tenant=tenant, vocab_size=9)
            with pytest.raises(InvalidRequest, match="bad"):
                await made.check(BAD, tenant=tenant, vocab_size=9)
    assert process.checked == [GOOD, BAD] * 2


async def test_what_groups_refused_is_refused_at_once_for_that_tenant_alone(
    made: Constraints, process: type[FakeProcess]
) -> None:
    await made.check(GOOD, tenant="A", vocab_size=9)

    async def refused(work: Work, take: Take) -> None:
        raise ConstraintRefused("too ambiguous")

    async def take(chunk: object) -> None:
        pass

    asked = prepared("r", [1], structured_outputs=GOOD, tenant="A")
    with pytest.raises(ConstraintRefused):
        await made.learn(Work(requests=[asked]), take, refused)
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        await made.check(GOOD, tenant="A", vocab_size=9)
    await made.check(GOOD, tenant="B", vocab_size=9)


async def test_one_tenants_constraints_keep_no_other_one_waiting(
    made: Constraints, process: type[FakeProcess]
) -> None:
    slow = [
        asyncio.create_task(
            made.check(Constraint("regex", f"slow{number}"), tenant="A", vocab_size=9)
        )
        for number in range(9)
    ]
    while not process.checked:
        await asyncio.sleep(0.001)
    await made.check(GOOD, tenant="B", vocab_size=9)
    assert len(process.checked) == 2
    process.may_go_on.set()
    await asyncio.gather(*slow)


def test_the_process_that_compiles_keeps_nothing() -> None:
    tokenizer = Tokenizer.load(demo_model.PATH)
    grammars = Grammars(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[0])
    grammars.check(GOOD)
    assert grammars.kept(GOOD) is None
    grammars.compile(GOOD, tenant="A")
    assert grammars.kept(GOOD, tenant="A") is not None
    assert grammars.kept(GOOD, tenant="B") is None
