"""Constrained outputs as a part of the engine: prepares grammars, then masks at each step."""

from collections.abc import Iterable
from collections.abc import Sequence as Items

from quire.worker.engine.part import Part
from quire.worker.engine.schedule import Schedule
from quire.worker.engine.sequence import Sequence, Status
from quire.worker.parts.constraints.choices import Constrained
from quire.worker.parts.constraints.compiling import Compiling, cannot_go_on
from quire.worker.parts.constraints.masks import Masks
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prepared
from quire.worker.text.grammar.compiler import Grammars


class Constraints(Part):
    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._compiling = Compiling(grammars)
        self._masks = Masks()
        self._begun: set[Sequence] = set()

    def check(self, request: Prepared) -> None:
        if request.sampling.constraint is not None:
            self.grammars.compile(
                request.sampling.constraint, tenant=request.tenant, is_checked=request.is_checked
            )

    def admit(self, seq: Sequence) -> bool:
        if seq.request.sampling.constraint is None:
            return True
        self._compiling.add(seq)
        self._begun.add(seq)
        return False

    @property
    def is_preparing(self) -> bool:
        return len(self._compiling) > 0

    def let_in(
        self, *, may_wait: bool, num_pending_tokens: int
    ) -> Iterable[tuple[Sequence, InvalidRequest | None]]:
        return self._compiling.take(may_wait=may_wait)

    def await_choices(
        self, running: Items[Sequence], *, is_idle: bool = False
    ) -> list[tuple[Sequence, InvalidRequest]]:
        found = self._masks.take_first() if is_idle else self._masks.take(running=running)
        return [(seq, cannot_go_on(seq, reason)) for seq, reason in found if reason is not None]

    def sampled(self, schedule: Schedule) -> None:
        if not self._begun:
            return
        self._masks.add(
            [
                seq
                for seq, num_samples, num_scored in zip(
                    schedule.sequences, schedule.num_samples, schedule.num_scored, strict=True
                )
                if num_samples > num_scored
                and isinstance(seq.choices, Constrained)
                and seq.status is not Status.FINISHED
                and seq not in schedule.void
            ]
        )

    def forget(self, seq: Sequence) -> None:
        if seq in self._begun:
            self._begun.remove(seq)
            self._compiling.remove(seq)
            self._masks.drop(seq)

    def close(self) -> None:
        self._compiling.close()
        self._masks.close()
