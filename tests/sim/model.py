"""A hash in place of the model, on a real engine that the simulated clock drives.

The KV of a token is the token itself, and the next token is a hash of all that is read back
through the block table, and of the seed. So a block that was shared wrongly, lost or written twice
yields a wrong token. `HashModel.continuation` computes the right ones from the prompt alone.
"""

import asyncio
import hashlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tests.direct_executor import DirectExecutor
from tests.steps import samples

from quire.cluster.group.engine_loop import EngineLoop
from quire.worker.group_engine import GroupEngine
from quire.worker.request.errors import RankFailure
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.text.tokenizer import Tokenizer

EOS = 256
POISON = 255
"""A prompt with this token kills the group that computes it."""

_LETTERS = b"abcdefghijklmnopqrstuvwxyz ."


def make_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte, in byte order, and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


class HashModel:
    """Computes the next token from a context and a seed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._letters = tokenizer.encode(_LETTERS.decode())

    def next_token(self, context: np.ndarray[Any, np.dtype[np.int64]], *, seed: int) -> int:
        data = context.tobytes() + seed.to_bytes(8, "little")
        number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return EOS if number % 100 == 0 else self._letters[number % len(self._letters)]

    def continuation(
        self, prompt: Sequence[int], *, seed: int, max_tokens: int, ignore_eos: bool
    ) -> list[int]:
        """The tokens that a correct cluster answers, including the end token."""
        context = np.zeros(len(prompt) + max_tokens, dtype=np.int64)
        context[: len(prompt)] = prompt
        for end in range(len(prompt), len(context)):
            context[end] = self.next_token(context[:end], seed=seed)
            if context[end] == EOS and not ignore_eos:
                context = context[: end + 1]
                break
        answer: list[int] = context[len(prompt) :].tolist()
        return answer


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The duration of a step."""

    step_s: float = 0.02
    token_s: float = 0.0005

    def __call__(self, num_tokens: int) -> float:
        return self.step_s + self.token_s * num_tokens


class HashExecutor(DirectExecutor):
    """The ranks: a KV cache of tokens."""

    def __init__(
        self, model: HashModel, *, num_blocks: int, block_size: int, host_kv_bytes: int = 0
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, host_kv_bytes=host_kv_bytes)
        self.failure: str | None = None
        """If set, the next step raises a `RankFailure` with this message."""
        self._block_size = block_size
        self._model = model
        self._slots = self.kv_NLW.reshape(-1)

    def execute(self, step: StepInput) -> StepOutput:
        if POISON in step.token_ids_T:
            self.failure = "rank 0 died of what it computed"
        if self.failure is not None:
            raise RankFailure(self.failure)
        self._slots[step.slot_mapping_T] = step.token_ids_T
        token_ids = []
        for sample, row, length in samples(step):
            positions = np.arange(length)
            blocks = step.block_tables_BM[row][positions // self._block_size].astype(np.int64)
            context = self._slots[blocks * self._block_size + positions % self._block_size]
            seed = int(step.sampling.seed_S[sample])
            token_ids.append(self._model.next_token(context, seed=seed))
        return StepOutput(np.array(token_ids, dtype=np.int64))


class _Inbox(queue.SimpleQueue[Callable[[], object] | None]):
    """A queue that signals when an item was put in."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()

    def put(
        self,
        item: Callable[[], object] | None,
        block: bool = True,
        timeout: float | None = None,
    ) -> None:
        super().put(item)
        self.filled.set()


class SimEngineLoop(EngineLoop):
    """An `EngineLoop` with a task in place of its thread and simulated durations of steps."""

    def __init__(self, engine: GroupEngine, *, cost: StepCost, max_step_tokens: int) -> None:
        self.can_step = asyncio.Event()
        """While cleared, the engine hangs in the next step that it begins."""
        self.can_step.set()
        self.slowness = 1.0
        """Factor by which each step takes longer than its cost."""
        self.idle_since_s: float | None = None
        """The time since which the engine has been idle; ``None`` while it works."""
        self._cost = cost
        self._max_step_tokens = max_step_tokens
        super().__init__(engine)

    async def close(self) -> None:
        self._inbox.put(None)
        await asyncio.wait([self._driver])

    def _start(self) -> None:
        self._inbox = self._filling = _Inbox()
        self._driver = self._loop.create_task(self._drive())

    async def _drive(self) -> None:
        with self._failing():
            while await self._take():
                self._num_turns += 1
                if self._engine.has_work:
                    await self.can_step.wait()
                    await asyncio.sleep(self.slowness * self._step_s())
                self._report(self._step())

    async def _take(self) -> bool:
        while not self._engine.has_work and self._inbox.empty():
            self._filling.filled.clear()
            self._is_idle = True
            if self.idle_since_s is None:
                self.idle_since_s = self._loop.time()
            await self._filling.filled.wait()
            self._is_idle = False
        if self._engine.has_work:
            self.idle_since_s = None
        return self._take_inbox()

    def _step_s(self) -> float:
        stats = self._engine.stats()
        num_tokens = min(stats.num_pending_prefill_tokens, self._max_step_tokens)
        return self._cost(num_tokens + stats.num_running)
