"""Prepares requests before they are queued: compiles their constraint, then reads their adapter,
then fetches blocks from disk or another group. Other requests run meanwhile.
"""

from collections.abc import Callable

from quire.worker.engine.scheduler import short_step
from quire.worker.engine.sequence import Sequence
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.adapters.reading import Read, Reading, reader
from quire.worker.parts.constraints.compiling import Compiling
from quire.worker.parts.tiers.arriving import Arriving
from quire.worker.parts.tiers.tiers import Travel
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import QuireError
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer


class Entrance:
    """The requests that are being prepared. Used from the engine's thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        *,
        load_tokenizer: Callable[[], Tokenizer] | None,
        read_adapter: Read | None,
        travel: Travel | None,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """``is_idle`` tells whether no request is queued or runs."""
        self.compiling = Compiling(
            Grammars(
                load_tokenizer or (lambda: Tokenizer.load(config.model)),
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
            )
        )
        self.reading = Reading(read_adapter or reader(config), max_kept=config.num_kept_loras)
        self.arriving: Arriving | None = None
        if travel is not None:
            self.arriving = Arriving(
                travel,
                block_size=config.block_size,
                step_tokens=short_step(config.max_num_batched_tokens),
                is_idle=is_idle,
                clock=clock,
            )

    def __len__(self) -> int:
        return len(self.compiling) + len(self.reading) + len(self.arriving or ())

    @property
    def has_work(self) -> bool:
        """Whether `take` would do anything."""
        return len(self) > 0 or self.fetches_for_queued

    @property
    def fetches_for_queued(self) -> bool:
        """Whether blocks are still arriving for requests that `take` has returned and that are
        queued behind others."""
        return self.arriving is not None and self.arriving.num_queued > 0

    def add(self, seq: Sequence) -> bool:
        """Returns whether ``seq`` may be queued at once. If not, `take` returns it when it may."""
        if seq.request.sampling.constraint is not None:
            self.compiling.add(seq)
            return False
        return self._is_ready(seq)

    def remove(self, seq: Sequence) -> bool:
        """Removes an aborted ``seq``. Returns whether it was here. In any case, the caller must
        also call `Reading.forget`."""
        if seq in self.compiling:
            self.compiling.remove(seq)
        elif self.arriving is not None and seq in self.arriving:
            self.arriving.remove(seq)
        else:
            return seq in self.reading
        return True

    def take(
        self, *, is_idle: bool, num_pending_tokens: int
    ) -> tuple[list[Sequence], list[tuple[Sequence, QuireError]]]:
        """Returns the sequences that may be queued now, and those that are refused with their
        errors. If the engine is idle, waits briefly for the first. ``num_pending_tokens`` is the
        number of tokens that queued and running prompts have yet to compute."""
        ready: list[Sequence] = []
        refused: list[tuple[Sequence, QuireError]] = []
        may_wait = is_idle and not self.arriving
        compiled = list(self.compiling.take(may_wait=may_wait and not self.reading))
        for seq, error in compiled:
            if error is not None:
                refused.append((seq, error))
            elif self._is_ready(seq):
                ready.append(seq)
        for seq, error in self.reading.take(may_wait=may_wait and not self.compiling):
            if error is not None:
                refused.append((seq, error))
            elif not self._waits_for_blocks(seq):
                ready.append(seq)
        if self.arriving is not None:
            ready += self.arriving.take(num_pending_tokens=num_pending_tokens)
        return ready, refused

    def close(self) -> None:
        self.compiling.close()
        self.reading.close()

    def _is_ready(self, seq: Sequence) -> bool:
        if seq.request.adapter and not self.reading.add(seq):
            return False
        return not self._waits_for_blocks(seq)

    def _waits_for_blocks(self, seq: Sequence) -> bool:
        return self.arriving is not None and self.arriving.add(seq)
