"""Concurrent requests with a shared prefix compute it once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.prepared import prepared

from quire.worker.group_engine import GroupEngine

MakeEngine = Callable[..., tuple[GroupEngine, Any]]
Generate = Callable[..., tuple[list[int], str]]

SHARED, OWN, OUTPUT, COUNT = 768, 48, 3, 6
BLOCK_SIZE = 16

RNG = np.random.default_rng(0)
PREFIX = RNG.integers(2, 50, SHARED).tolist()
PROMPTS = [[*PREFIX, *RNG.integers(2, 50, OWN).tolist()] for _ in range(COUNT)]


class Harness:
    """An engine that receives requests one by one, and counts the tokens its executor computes."""

    def __init__(self, make_engine: MakeEngine, *, budget: int, num_blocks: int = 200) -> None:
        self.engine, self._executor = make_engine(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=budget
        )
        self.outputs: list[list[int]] = [[] for _ in PROMPTS]

    def add(self, index: int) -> None:
        self.engine.add_request(
            prepared(str(index), PROMPTS[index], max_tokens=OUTPUT, ignore_eos=True)
        )

    def step(self) -> None:
        for delta in self.engine.step():
            self.outputs[int(delta.request_id)] += delta.token_ids

    def run(self) -> None:
        while self.engine.has_work:
            self.step()

    @property
    def num_prefilled(self) -> int:
        """Number of prompt tokens that the executor computed, without decodes."""
        num_tokens = sum(len(step.token_ids_T) for step in self._executor.steps)
        # The last token of an output is never given to the model.
        return num_tokens - sum(max(len(output) - 1, 0) for output in self.outputs)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """A list that the first test fills with each request's tokens, computed without any cache."""
    return []


@pytest.fixture
def expected(alone: list[list[int]], generate: Generate) -> list[list[int]]:
    if not alone:
        alone += [generate(prompt, max_tokens=OUTPUT, stop=())[0] for prompt in PROMPTS]
    return alone


# One step; a step and a rest; chunks that end within a block; a last chunk that is exactly full.
@pytest.mark.parametrize("budget", [2048, 800, 250, 100, 48])
def test_of_requests_added_at_once_the_first_computes_the_prefix(
    make_engine: MakeEngine, expected: list[list[int]], budget: int
) -> None:
    harness = Harness(make_engine, budget=budget)
    for index in range(COUNT):
        harness.add(index)
    harness.run()
    assert harness.num_prefilled == SHARED + COUNT * OWN
    assert harness.engine.stats().num_hit_tokens == (COUNT - 1) * SHARED
    assert harness.outputs == expected


@pytest.mark.parametrize("budget", [2048, 250, 100])
@pytest.mark.parametrize("steps_between", [1, 2, 3])
def test_requests_that_arrive_while_the_prefix_is_computed_wait_for_it_and_share_it(
    make_engine: MakeEngine, expected: list[list[int]], budget: int, steps_between: int
) -> None:
    harness = Harness(make_engine, budget=budget)
    for index in range(COUNT):
        harness.add(index)
        for _ in range(steps_between):
            harness.step()
    harness.run()
    assert harness.num_prefilled == SHARED + COUNT * OWN
    assert harness.engine.stats().num_hit_tokens == (COUNT - 1) * SHARED
    assert harness.outputs == expected


def test_when_the_first_is_aborted_the_next_goes_on_from_what_it_computed(
    make_engine: MakeEngine, expected: list[list[int]]
) -> None:
    harness = Harness(make_engine, budget=250)
    for index in range(COUNT):
        harness.add(index)
    harness.step()
    harness.step()
    assert harness.engine.abort("0")
    harness.run()
    # 500 tokens are 31 blocks and 4 tokens, which are computed again.
    assert harness.num_prefilled == 4 + SHARED + (COUNT - 1) * OWN
    assert harness.outputs[1:] == expected[1:]


def test_when_there_is_no_room_for_all_the_prefix_is_held_once(
    make_engine: MakeEngine, expected: list[list[int]]
) -> None:
    num_blocks = SHARED // BLOCK_SIZE + 12  # Room for three requests' own 4 blocks each.
    harness = Harness(make_engine, budget=2048, num_blocks=num_blocks)
    for index in range(COUNT):
        harness.add(index)
    harness.run()
    assert harness.num_prefilled == SHARED + COUNT * OWN
    assert harness.outputs == expected
