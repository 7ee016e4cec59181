"""A minimal driver that runs sequences through an executor without an engine, and its fixtures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.steps import adjusting

from quire.worker.rank.host_memory import map_host_blocks
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import Executor, StepInput
from quire.worker.step.sampling_batch import Edits, SamplingBatch


@dataclass(frozen=True)
class Row:
    """A sequence in a step: its first ``done`` tokens are computed, the others are computed now."""

    token_ids: Sequence[int]
    blocks: Sequence[int]
    done: int = 0
    samples: bool = True


class Driver:
    """Builds steps, decodes (one new token) first."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size

    def sampling(
        self, num_rows: int, *, edits: dict[int, Edits] | None = None, **columns: Any
    ) -> SamplingBatch:
        """Greedy without logprobs, except for ``columns``: a value for all rows or one for each.
        ``edits`` are by row."""

        def column(name: str, default: float, dtype: type) -> Any:
            return np.broadcast_to(np.asarray(columns.pop(name, default), dtype), num_rows).copy()

        batch: dict[str, Any] = {
            "temperature_S": column("temperature", 0.0, np.float32),
            "top_p_S": column("top_p", 1.0, np.float32),
            "top_k_S": column("top_k", 0, np.int32),
            "min_p_S": column("min_p", 0.0, np.float32),
            "seed_S": column("seed", 0, np.int64),
            "position_S": column("position", 0, np.int64),
            "num_logprobs_S": column("num_logprobs", -1, np.int32),
        }
        return SamplingBatch(
            **batch, **columns, adjustments=adjusting(edits or {}, num_samples=num_rows)
        )

    def step(self, rows: Sequence[Row], **sampling: Any) -> StepInput:
        token_ids, positions, slots, starts = [], [], [], [0]
        for row in rows:
            for position in range(row.done, len(row.token_ids)):
                block, offset = divmod(position, self.block_size)
                token_ids.append(row.token_ids[position])
                positions.append(position)
                slots.append(row.blocks[block] * self.block_size + offset)
            starts.append(len(token_ids))
        used = [-(-len(row.token_ids) // self.block_size) for row in rows]
        tables = np.zeros((len(rows), max(used)), np.int32)
        for index, row in enumerate(rows):
            tables[index, : used[index]] = row.blocks[: used[index]]
        sampled = [starts[index + 1] - 1 for index, row in enumerate(rows) if row.samples]
        return StepInput(
            token_ids_T=np.array(token_ids, np.int64),
            positions_T=np.array(positions, np.int64),
            slot_mapping_T=np.array(slots, np.int64),
            block_tables_BM=tables,
            seq_lens_B=np.array([len(row.token_ids) for row in rows], np.int32),
            query_starts_B1=np.array(starts, np.int32),
            num_decodes=sum(len(row.token_ids) - row.done == 1 for row in rows),
            samples_S=np.array(sampled, np.int32),
            sampling=self.sampling(len(sampled), **sampling),
        )

    def generate(
        self, executor: Executor, prompts: Sequence[Sequence[int]], *, num_tokens: int
    ) -> list[list[int]]:
        """Greedy continuations, all sequences together in one batch; blocks are interleaved."""
        sequences = [list(prompt) for prompt in prompts]
        blocks = [range(index, executor.num_blocks, len(prompts)) for index in range(len(prompts))]
        done = [0] * len(prompts)
        for _ in range(num_tokens):
            rows = [Row(s, b, d) for s, b, d in zip(sequences, blocks, done, strict=True)]
            order = sorted(
                range(len(rows)), key=lambda i: len(rows[i].token_ids) - rows[i].done != 1
            )
            executor.submit(self.step([rows[index] for index in order]))
            output = executor.result()
            for index, token in zip(order, output.token_ids_S, strict=True):
                done[index] = len(sequences[index])
                sequences[index].append(int(token))
        return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


@pytest.fixture(scope="session")
def driver() -> Driver:
    return Driver()


@pytest.fixture(scope="session")
def driver_of() -> type[Driver]:
    """The class `Driver`, for tests with other block sizes."""
    return Driver


@pytest.fixture(scope="session")
def row() -> type[Row]:
    return Row


@pytest.fixture(scope="session")
def config_of() -> Callable[..., EngineConfig]:
    """Builds an `EngineConfig` for a CPU and small tests."""

    def config(model: Path, **fields: Any) -> EngineConfig:
        small: dict[str, Any] = {
            "device": "cpu",
            "num_blocks": 128,
            "step_timeout_s": 120.0,
            "num_threads": 1,
        }
        return EngineConfig(model=model, **(small | fields))

    return config


@pytest.fixture(scope="session")
def runner_of(config_of: Callable[..., EngineConfig]) -> Callable[..., Any]:
    """Builds a `ModelRunner` of one rank, ready for steps."""

    def make(model: Path, **fields: Any) -> Any:
        import torch

        from quire.worker.rank.collectives import TensorParallel
        from quire.worker.rank.runner import ModelRunner

        config = config_of(model, **fields)
        runner = ModelRunner(config, device=torch.device("cpu"), tp=TensorParallel())
        host_blocks_XC = map_host_blocks(runner.kv_format, num_slots=runner.num_host_blocks)
        runner.allocate(runner.num_blocks_that_fit(), host_blocks_XC)
        return runner

    return make


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Any]:
    """transformers' own model of a checkpoint."""
    models: dict[Path, Any] = {}

    def load(path: Path) -> Any:
        from transformers import LlamaForCausalLM

        if path not in models:
            models[path] = LlamaForCausalLM.from_pretrained(path, attn_implementation="eager")
        return models[path]

    return load
