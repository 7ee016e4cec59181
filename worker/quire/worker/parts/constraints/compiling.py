"""Requests whose constraint a thread compiles while other requests run."""

import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from quire.worker.engine.sequence import Sequence
from quire.worker.parts.constraints.choices import Constrained
from quire.worker.parts.constraints.edits import RequestEdits
from quire.worker.request.errors import ConstraintRefused, InvalidRequest
from quire.worker.text.grammar.compile_queue import CompileThreads
from quire.worker.text.grammar.compiler import Grammar, Grammars
from quire.worker.text.grammar.matcher import Matcher

_log = logging.getLogger(__name__)

_WAIT_S = 0.005
"""How long an idle engine waits here before it looks for new requests."""


class Compiling:
    """Used from the engine's thread. Starts its own thread with the first constraint."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._thread = CompileThreads(1)
        self._matchers: dict[Sequence, Future[Matcher]] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def add(self, seq: Sequence) -> None:
        """Compiles the constraint of ``seq``. If its grammar is known and the output has not begun,
        the next `take` returns ``seq`` at once."""
        request = seq.request
        constraint, token_ids = request.sampling.constraint, request.resumed_token_ids
        assert constraint is not None
        tenant, is_checked = request.tenant, request.is_checked
        grammar = self.grammars.kept(constraint, tenant=tenant)
        if grammar is not None and not len(token_ids):
            ready: Future[Matcher] = Future()
            if isinstance(grammar, Grammar):
                ready.set_result(grammar.matcher())
            else:
                ready.set_exception(ConstraintRefused(grammar))
            self._matchers[seq] = ready
            return
        self._matchers[seq] = self._thread.submit(
            lambda: self.grammars.compile(constraint, tenant=tenant, is_checked=is_checked).matcher(
                token_ids
            ),
            constraint,
            tenant=tenant,
        )

    def remove(self, seq: Sequence) -> None:
        """Removes ``seq``, if it is here."""
        if (matcher := self._matchers.pop(seq, None)) is not None:
            matcher.cancel()

    def take(self, *, may_wait: bool) -> Iterator[tuple[Sequence, InvalidRequest | None]]:
        """Removes and yields the sequences that are ready, with their choices set, and those that
        are refused, with the error. ``may_wait``: the engine is idle, so this may wait briefly."""
        if may_wait:
            wait(self._matchers.values(), _WAIT_S, FIRST_COMPLETED)
        for seq in [seq for seq, future in self._matchers.items() if future.done()]:
            yield seq, self._finish(seq, self._matchers.pop(seq))

    def close(self) -> None:
        self._thread.close()
        self.grammars.close()

    def _finish(self, seq: Sequence, future: "Future[Matcher]") -> InvalidRequest | None:
        error = future.exception()
        if error is None:
            assert isinstance(seq.choices, RequestEdits)
            seq.choices = choices = Constrained(seq.choices, future.result())
            reason = choices.take_mask(num_output=seq.num_output_tokens)
            return None if reason is None else cannot_go_on(seq, reason)
        if isinstance(error, InvalidRequest):
            return error
        # An unexpected error fails only this request.
        _log.error("a constraint could not be compiled", exc_info=error)
        return InvalidRequest(
            f"structured_outputs could not be compiled: {error!r}", param="structured_outputs"
        )


def cannot_go_on(seq: Sequence, reason: str) -> InvalidRequest:
    """The error for ``seq``, whose constraint allows no next token."""
    constraint = seq.request.sampling.constraint
    assert isinstance(seq.choices, Constrained)
    assert constraint is not None
    if seq.choices.matcher.cost.is_spent:
        return ConstraintRefused(f"structured_outputs={constraint.kind}: {reason}")
    return InvalidRequest(
        f"structured_outputs: the output cannot go on behind {seq.num_output_tokens} tokens: "
        f"{reason}",
        param="structured_outputs",
    )
