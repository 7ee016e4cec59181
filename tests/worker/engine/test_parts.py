"""What a part of the engine can do: make requests wait, refuse them, add to steps, run its own."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.prepared import prepared
from tests.worker.conftest import VOCAB_SIZE, PagedExecutor
from tests.worker.engine_requests import Generate, request

from quire.worker.engine.engine import Engine
from quire.worker.engine.part import Part, Parts
from quire.worker.engine.schedule import Schedule
from quire.worker.engine.sequence import Sequence
from quire.worker.model.facts import ModelFacts
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import InvalidRequest, QuireError

PROMPT = [5, 6, 7, 8, 9]


def engine_with(part: Part) -> tuple[Engine, PagedExecutor]:
    executor = PagedExecutor(num_blocks=16, block_size=4, num_ahead=0)
    config = EngineConfig(
        model=Path("none"), block_size=4, max_num_seqs=8, max_num_batched_tokens=32
    )
    facts = ModelFacts(
        name="hash",
        fingerprint="hash-1",
        vocab_size=VOCAB_SIZE,
        max_model_len=60,
        eos_token_ids=(1,),
        kv_dtype="float32",
    )
    return Engine(config, facts, executor, make_parts=lambda host: Parts(every=[part])), executor


class Gate(Part):
    """Prepares every request until it is told the outcome."""

    def __init__(self) -> None:
        self.kept: list[Sequence] = []
        self.outcome: QuireError | None = None
        self.is_open = False
        self.ended: list[Sequence] = []

    def admit(self, seq: Sequence) -> bool:
        self.kept.append(seq)
        return False

    @property
    def is_preparing(self) -> bool:
        return len(self.kept) > 0

    def let_in(self, **_: Any) -> Iterable[tuple[Sequence, QuireError | None]]:
        if self.is_open:
            while self.kept:
                yield self.kept.pop(), self.outcome

    def forget(self, seq: Sequence) -> None:
        self.ended.append(seq)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_request_is_queued_or_refused_when_the_part_says_so(
    generate: Generate, refuses: bool
) -> None:
    gate = Gate()
    engine, executor = engine_with(gate)
    engine.add_request(request("a", PROMPT, max_tokens=1))
    assert engine.step() == []
    assert (executor.steps, engine.stats().num_waiting) == ([], 1)
    gate.is_open, gate.outcome = True, InvalidRequest("no") if refuses else None
    (output,) = engine.step()
    if refuses:
        assert (output.finish_reason, output.error, executor.steps) == ("abort", gate.outcome, [])
    else:
        assert list(output.token_ids) == generate(PROMPT, max_tokens=1, stop=())[0]
    assert len(gate.ended) == 1
    assert not engine.has_work


def test_a_request_that_a_part_prepares_can_be_aborted() -> None:
    gate = Gate()
    engine, _ = engine_with(gate)
    engine.add_request(request("a", PROMPT))
    assert engine.abort("a")
    assert gate.ended == gate.kept
    assert not engine.has_work


class HoldsBack(Part):
    """Holds running sequences back for some steps."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.change: Callable[[set[str]], None] = lambda waits: None

    def queued(self, seq: Sequence) -> None:
        self.sequences.append(seq)

    def next_step(self) -> tuple[list[Sequence], list[Sequence]]:
        waited = {seq for seq in self.sequences if seq.waits}
        for seq in self.sequences:
            self.change(seq.waits)
        waits = {seq for seq in self.sequences if seq.waits}
        return [*(waited - waits)], [*(waits - waited)]

    def chosen(self, schedule: Schedule) -> dict[str, Any]:
        return {"adapter_loads": ((0, "blue"),)}


def test_no_step_computes_what_waits_for_a_part_and_its_fields_are_in_steps(
    generate: Generate,
) -> None:
    part = HoldsBack()
    engine, executor = engine_with(part)
    engine.add_request(request("a", PROMPT, max_tokens=4))
    tokens = [token for output in engine.step() for token in output.token_ids]
    part.change = lambda waits: waits.add("part")
    engine.add_request(request("b", PROMPT[:3], max_tokens=4))
    for _ in range(3):
        assert engine.step() == []
    assert len(executor.steps) == 1
    assert engine.stats().num_held_blocks > 0
    part.change = lambda waits: waits.clear()
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids if output.request_id == "a" else ()
    assert tokens == generate(PROMPT, max_tokens=4, stop=())[0]
    assert executor.adapters == {0: "blue"}


class Recomputes(Part):
    """Computes a prompt for itself once the engine is idle."""

    def __init__(self) -> None:
        self.num_left = 1
        self.computed: list[np.ndarray[Any, Any]] = []

    @property
    def has_work(self) -> bool:
        return self.num_left > 0

    def own_sequence(self) -> Sequence | None:
        self.num_left -= 1
        if self.num_left < 0:
            return None
        return Sequence(
            prepared("own", PROMPT),
            seed=0,
            max_tokens=1,
            eos_token_ids=(1,),
            block_size=4,
            chain=None,
            owner=self,
        )

    def owned_ran(self, seq: Sequence) -> None:
        self.computed.append(seq.block_ids)


def test_what_a_part_computes_for_itself_has_no_output() -> None:
    part = Recomputes()
    engine, executor = engine_with(part)
    engine.add_request(request("a", [9, 8, 7], max_tokens=2))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"a"}
    assert [len(blocks) for blocks in part.computed] == [2]
    assert engine.stats().num_held_blocks == 0
    assert len(executor.steps) == 3
