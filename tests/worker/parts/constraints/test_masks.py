"""A slow mask delays only its own request, and does not change its tokens."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.worker.engine_requests import Generate, MakeEngine, request

from quire.worker.group_engine import GroupEngine
from quire.worker.parts.constraints import masks
from quire.worker.request.errors import ConstraintRefused
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared
from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.compiler import Grammar
from quire.worker.text.grammar.mask_cost import MaskCost
from quire.worker.text.grammar.matcher import Matcher, Place
from quire.worker.text.grammar.recent import RecentSeconds

PROMPT = [2, 3, 4, 5, 6, 7]
OTHER = [9, 8, 7]
WAIT_S = 60


@dataclass
class Gate:
    """Holds up mask computations until opened; records the tokens of each computed mask."""

    is_open: threading.Event = field(default_factory=threading.Event)
    filled: list[tuple[int, ...]] = field(default_factory=list)
    cost_s: float = 0.0

    def open(self) -> None:
        self.is_open.set()


class SlowMatcher(Matcher):
    """A matcher that allows every token once its gate is open."""

    def __init__(self, gate: Gate, place: Place, cost: MaskCost) -> None:
        super().__init__(None, place, cost)  # type: ignore[arg-type]
        self._gate = gate

    def fill(self, *, is_slow: bool = False) -> float:
        assert self._gate.is_open.wait(WAIT_S)
        self._gate.filled.append(tuple(self._unread))
        self.place.mask_W[:] = -1
        self.place.is_ready = True
        return self._gate.cost_s


class SlowGrammar(Grammar):
    def __init__(self, gate: Gate) -> None:
        super().__init__(None, 2, MaskCost(RecentSeconds()))  # type: ignore[arg-type]
        self._gate = gate
        self.start.mask_W[:] = -1
        self.start.is_ready = True

    def matcher(self, token_ids: Any = ()) -> Matcher:
        assert not len(token_ids)
        return SlowMatcher(self._gate, self.start, self.cost)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()  # No thread is left waiting.


@pytest.fixture
def make_slow(make_engine: MakeEngine, gate: Gate) -> Callable[..., tuple[GroupEngine, Any]]:
    """An engine for which every constraint means the slow grammar."""

    def make(**options: Any) -> tuple[GroupEngine, Any]:
        engine, executor = make_engine(**{"num_blocks": 64, **options})
        grammars = engine.constraints.grammars
        grammars._kept.put("", TEXT, SlowGrammar(gate))
        return engine, executor

    return make


TEXT = Constraint("regex", "slow")


def slow(request_id: str, **params: Any) -> Prepared:
    return request(request_id, PROMPT, **{"structured_outputs": TEXT, "max_tokens": 5, **params})


def drain(engine: GroupEngine) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def run_until_ended(engine: GroupEngine, request_id: str) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    while not any(delta.finish_reason for delta in found.get(request_id, ())):
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


AHEAD = pytest.mark.parametrize("num_ahead", [0, 1])


@AHEAD
def test_requests_go_on_beside_a_mask_that_takes_long(
    make_slow: MakeEngine, generate: Generate, gate: Gate, num_ahead: int
) -> None:
    engine, _ = make_slow(num_ahead=num_ahead)
    for number in range(3):
        engine.add_request(slow(f"slow {number}", seed=number))
    engine.add_request(request("other", OTHER, max_tokens=30))
    found = run_until_ended(engine, "other")
    assert tokens(found["other"]) == generate(OTHER, max_tokens=30, stop=())[0]
    assert [len(tokens(found[f"slow {number}"])) for number in range(3)] == [1, 1, 1]
    assert engine.stats().num_held_blocks > 0
    gate.open()
    rest = drain(engine)
    for number in range(3):
        expected, _ = generate(PROMPT, max_tokens=5, seed=number)
        name = f"slow {number}"
        assert tokens(found[name]) + tokens(rest[name]) == expected
    assert engine.stats().num_held_blocks == 0


@AHEAD
def test_a_step_of_late_rows_only_waits_for_the_first_of_them(
    make_slow: MakeEngine, generate: Generate, gate: Gate, num_ahead: int
) -> None:
    engine, executor = make_slow(num_ahead=num_ahead)
    engine.add_request(slow("slow"))
    found = [delta for _ in range(20) for delta in engine.step()]
    assert len(tokens(found)) == 1
    assert len(executor.steps) <= 2
    gate.open()
    assert tokens(found + drain(engine)["slow"]) == generate(PROMPT, max_tokens=5)[0]


def test_completions_share_masks_as_long_as_they_agree(
    make_slow: MakeEngine, generate: Generate, gate: Gate
) -> None:
    gate.open()
    engine, _ = make_slow()
    seeds = [0] * 4 + [1] * 2
    for number, seed in enumerate(seeds):
        engine.add_request(slow(str(number), seed=seed))
    found = drain(engine)
    outputs = [generate(PROMPT, max_tokens=5, seed=seed)[0] for seed in seeds]
    assert [tokens(found[str(number)]) for number in range(6)] == outputs
    prefixes = {tuple(output[:end]) for output in outputs for end in range(1, 5)}
    # No mask follows an end token.
    assert len(gate.filled) == len([each for each in prefixes if each[-1] != 1])


@AHEAD
def test_a_late_request_can_be_preempted_and_goes_on(
    make_slow: MakeEngine, generate: Generate, gate: Gate, num_ahead: int
) -> None:
    engine, _ = make_slow(num_ahead=num_ahead, num_blocks=6)
    engine.add_request(request("first", OTHER, max_tokens=15))
    engine.add_request(slow("slow"))
    found = run_until_ended(engine, "first")
    assert engine.stats().num_preemptions == 1
    assert tokens(found["first"]) == generate(OTHER, max_tokens=15, stop=())[0]
    for _ in range(5):
        engine.step()  # Recomputes the prompt, but no token can be drawn.
    gate.open()
    rest = drain(engine)
    assert tokens(found["slow"] + rest["slow"]) == generate(PROMPT, max_tokens=5)[0]
    assert engine.stats().num_held_blocks == 0


@AHEAD
def test_a_late_request_can_be_aborted(make_slow: MakeEngine, gate: Gate, num_ahead: int) -> None:
    engine, _ = make_slow(num_ahead=num_ahead)
    for number in range(4):
        engine.add_request(slow(str(number), seed=number))
    for _ in range(4):
        engine.step()
    for number in range(4):
        assert engine.abort(str(number))
    while engine.has_work:
        engine.step()
    assert engine.stats().num_held_blocks == 0
    gate.open()
    engine.add_request(request("other", OTHER))
    drain(engine)
    assert len(gate.filled) <= 1  # Masks of aborted requests are not begun.


def test_a_grammar_that_took_too_long_ends_its_requests_and_begins_no_other_one(
    make_slow: MakeEngine, generate: Generate, gate: Gate
) -> None:
    gate.cost_s = 0.4
    gate.open()
    engine, executor = make_slow()
    engine.add_request(slow("slow", max_tokens=50))
    engine.add_request(request("other", OTHER, max_tokens=50))
    found = drain(engine)
    assert len(tokens(found["slow"])) == 3
    assert isinstance(found["slow"][-1].error, ConstraintRefused)
    assert "the grammar is ambiguous" in str(found["slow"][-1].error)
    assert tokens(found["other"]) == generate(OTHER, max_tokens=50, stop=())[0]
    num_steps = len(executor.steps)
    engine.add_request(slow("again"))
    (refused,) = drain(engine)["again"]
    assert str(refused.error) == str(found["slow"][-1].error)
    assert len(executor.steps) == num_steps


@AHEAD
def test_no_row_sits_out_where_masks_are_computed_in_time(
    make_slow: MakeEngine, gate: Gate, num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_UNKNOWN_WAIT_S", WAIT_S)
    gate.open()
    engine, executor = make_slow(num_ahead=num_ahead)
    for number in range(4):
        engine.add_request(slow(str(number), seed=number, min_tokens=9, max_tokens=9))
    drain(engine)
    assert len(executor.steps) == 9
