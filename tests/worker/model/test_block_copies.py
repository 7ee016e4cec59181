"""Blocks that a step copies before it computes, within the cache and between tiers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.engine_requests import request, run

from quire.worker.engine import Engine
from quire.worker.ranks.executor import make_executor
from quire.worker.step.messages import StepInput

PROMPT = np.random.default_rng(3).integers(3, 320, 37).tolist()
BLOCKS = [4, 2, 7]


def with_copies(step: StepInput, *copies: tuple[tuple[int, int], tuple[int, int]]) -> StepInput:
    return replace(step, copies_X22=np.array(copies, np.int32))


@pytest.mark.quick_cells("1")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_copy_of_a_cached_block_gives_the_same_tokens(
    num_ranks: int, tiny_llama: Path, config_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_llama, tensor_parallel_size=num_ranks)
    executor, facts = make_executor(config)
    engine, submit, spare = Engine(config, facts, executor), executor.submit, 127
    try:
        expected = run(engine, request("first", PROMPT, max_tokens=8, temperature=0))["first"]
        for source, is_same in ((0, True), (1, False)):
            steps: list[StepInput] = []

            def read_the_copy(step: StepInput, source: int = source, steps: Any = steps) -> None:
                cached = step.block_tables_BM[0].copy()
                step.block_tables_BM[0, 0] = spare
                if not steps:
                    step = with_copies(step, ((0, cached[source]), (0, spare)))
                steps.append(step)
                submit(step)

            monkeypatch.setattr(executor, "submit", read_the_copy)
            found = run(engine, request("again", PROMPT, max_tokens=8, temperature=0))["again"]
            assert found.num_cached_tokens == 32
            assert (found.token_ids == expected.token_ids) == is_same
    finally:
        engine.close()


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}])
def test_blocks_go_to_a_tier_of_the_host_and_come_back(
    options: dict[str, Any], tiny_llama: Path, runner_of: Any, driver: Any, row: Any
) -> None:
    runner = runner_of(tiny_llama, kv_transfer=True, **options)
    runner.execute(driver.step([row(PROMPT[:36], BLOCKS)]))
    runner.execute(driver.step([row(PROMPT[::-1], [9, 10, 11])]))
    last = driver.step([row(PROMPT, BLOCKS, done=36)], num_logprobs=5)
    expected = runner.execute(last)
    kept = [cache[BLOCKS].clone() for pair in runner._kv for cache in pair]
    out = [((0, block), (1, place)) for place, block in enumerate(BLOCKS[:2])]
    over = [((0, 9), (0, BLOCKS[0])), ((0, 10), (0, BLOCKS[1]))]
    assert runner.execute(with_copies(last, *out, *over)).logprobs != expected.logprobs
    # One copy after the other: of the last two only the first brings back what was lost.
    back = [(there, here) for here, there in out]
    assert runner.execute(with_copies(last, *back)) == expected
    assert runner.execute(with_copies(last, *over, *back)) == expected
    for cache, whole in zip((c for pair in runner._kv for c in pair), kept, strict=True):
        assert torch.equal(cache[BLOCKS].view(torch.uint8), whole.view(torch.uint8))
