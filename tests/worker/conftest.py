"""Fixtures: a made-up model whose tokens reveal any error in its KV cache, and an engine for it.

Its "KV" of a token is the token, its position and its adapter. A row "attends" by reading them
back through its block table, and its next token is a hash of all that it read, the seed and the
adapter. So any error of the engine with blocks changes tokens. The fixture `generate` computes the
right ones from the prompt alone.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.direct_executor import DirectExecutor
from tests.steps import banned_ids, samples
from tests.worker import drivers

from quire.worker.group_engine import GroupEngine
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.adapters.reading import Read
from quire.worker.parts.tiers.pull import Fetch
from quire.worker.request.arrays import Longs
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import RankFailure
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.step.messages import StepInput, StepOutput

config_of, driver, driver_of = drivers.config_of, drivers.driver, drivers.driver_of
oracle, row, runner_of = drivers.oracle, drivers.row, drivers.runner_of

VOCAB_SIZE = 50
EOS = 1


def next_token(
    context: Sequence[int], *, seed: int, banned: Collection[int] = (), adapter: str = ""
) -> int:
    text = adapter + ",".join(map(str, context))
    for attempt in range(10_000):
        digest = hashlib.blake2b(f"{text}/{seed}/{attempt}".encode(), digest_size=4).digest()
        token_id = int.from_bytes(digest, "little") % VOCAB_SIZE
        if token_id not in banned:
            return token_id
    raise AssertionError("every token is banned")


def owner(adapter: str) -> int:
    """A number derived from the adapter's name, the same in any process."""
    return int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=7).digest(), "little")


class PagedExecutor(DirectExecutor):
    """Executes steps as ranks would, and asserts the invariants of each `StepInput`."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_ahead: int, host_kv_bytes: int = 0
    ) -> None:
        super().__init__(
            num_blocks=num_blocks, block_size=block_size, num_words=3, host_kv_bytes=host_kv_bytes
        )
        self.num_ahead = num_ahead
        self.steps: list[StepInput] = []
        self.fails = False
        self.on_execute: Callable[[StepInput], None] = lambda step: None
        self._block_size = block_size
        self.kv_NLW[...] = -1
        self._tokens, self._positions, self._owners = self.kv_NLW.reshape(-1, 3).T
        self.adapters: dict[int, str] = {}
        """Adapters by slot."""
        self._sampled: Longs = np.empty(0, np.int64)

    def submit(self, step: StepInput) -> None:
        assert len(self._submitted) <= self.num_ahead
        super().submit(step)

    def execute(self, step: StepInput) -> StepOutput:
        if self.fails:
            raise RankFailure("rank 1 died")
        self.steps.append(step)
        self.on_execute(step)
        self._check(step)
        self.adapters.update(step.adapter_loads)
        slots_B = step.adapter_slots_A.tolist() or [-1] * len(step.seq_lens_B)
        adapters = [self.adapters[slot] if slot >= 0 else "" for slot in slots_B]
        step.token_ids_T[step.late_tokens_L] = self._sampled[step.late_rows_L]
        # As in each layer of a model: the KV of the whole step is written, then rows attend.
        self._tokens[step.slot_mapping_T] = step.token_ids_T
        self._positions[step.slot_mapping_T] = step.positions_T
        num_tokens_B = np.diff(step.query_starts_B1)
        owners_B = np.array([owner(adapter) for adapter in adapters], np.int64)
        self._owners[step.slot_mapping_T] = owners_B.repeat(num_tokens_B)
        contexts = [self._read(step, row, adapter) for row, adapter in enumerate(adapters)]

        sampling = step.sampling
        token_ids = []
        for sample, row, length in samples(step):
            assert sampling.position_S[sample] == length
            banned, seed = banned_ids(sampling, sample), int(sampling.seed_S[sample])
            context = contexts[row][:length]
            token_ids.append(next_token(context, seed=seed, banned=banned, adapter=adapters[row]))
        self._sampled = sampling.with_given(np.array(token_ids, dtype=np.int64))
        token_ids = self._sampled.tolist()
        wanted = sampling.num_logprobs_S.tolist()
        logprobs = tuple(
            TokenLogprobs(token_id, -1.0, 1, ()) if number >= 0 else None
            for token_id, number in zip(token_ids, wanted, strict=True)
        )
        return StepOutput(self._sampled, logprobs if any(logprobs) else ())

    def close(self) -> None:
        pass

    def _check(self, step: StepInput) -> None:
        num_queries = np.diff(step.query_starts_B1)
        assert step.query_starts_B1[0] == 0
        assert step.query_starts_B1[-1] == len(step.token_ids_T) == len(step.positions_T)
        assert (num_queries[: step.num_decodes] == 1).all()
        assert (num_queries[step.num_decodes :] > 1).all()
        assert len(set(step.slot_mapping_T.tolist())) == len(step.slot_mapping_T), "two writers"

    def _read(self, step: StepInput, row: int, adapter: str) -> list[int]:
        seq_len = int(step.seq_lens_B[row])
        positions = np.arange(seq_len)
        table = step.block_tables_BM[row].astype(np.int64)
        slots = table[positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        assert (self._positions[slots] == positions).all(), f"row {row} reads foreign KV"
        assert (self._owners[slots] == owner(adapter)).all(), (
            f"row {row} reads another adapter's KV"
        )
        begin, end = step.query_starts_B1[row], step.query_starts_B1[row + 1]
        assert (step.positions_T[begin:end] == positions[seq_len - (end - begin) :]).all()
        context: list[int] = self._tokens[slots].tolist()
        return context


@pytest.fixture
def make_engine() -> Callable[..., tuple[GroupEngine, PagedExecutor]]:
    """Builds an engine of ``num_blocks`` small blocks; options are those of `EngineConfig`."""

    def make(
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        num_ahead: int = 0,
        read_adapter: Read | None = None,
        host_kv_bytes: int = 0,
        fetch: Fetch | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: object,
    ) -> tuple[GroupEngine, PagedExecutor]:
        executor = PagedExecutor(
            num_blocks=num_blocks,
            block_size=block_size,
            num_ahead=num_ahead,
            host_kv_bytes=host_kv_bytes,
        )
        defaults: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
        config = EngineConfig(
            model=Path("none"),
            block_size=block_size,
            **{**defaults, **options},  # type: ignore[arg-type]
        )
        facts = ModelFacts(
            name="hash",
            fingerprint="hash-1",
            vocab_size=VOCAB_SIZE,
            max_model_len=1_000,
            eos_token_ids=(EOS,),
            kv_dtype="float32",
        )
        engine = GroupEngine(
            config, facts, executor, read_adapter=read_adapter, fetch=fetch, clock=clock
        )
        return engine, executor

    return make


@pytest.fixture
def generate() -> Callable[..., tuple[list[int], str]]:
    """Computes the model's output tokens and finish reason for a prompt, without any cache."""

    def generate(
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int = 0,
        stop: Collection[int] = (EOS,),
        banned: Collection[int] = (),
        min_tokens: int = 0,
        adapter: str = "",
    ) -> tuple[list[int], str]:
        output: list[int] = []
        while len(output) < max_tokens:
            too_early = banned if len(output) < min_tokens else ()
            context = [*prompt, *output]
            output.append(next_token(context, seed=seed, banned=too_early, adapter=adapter))
            if output[-1] in stop:
                return output, "stop"
        return output, "length"

    return generate
