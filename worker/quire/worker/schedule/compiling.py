"""Requests whose constraint is being compiled, by a thread, while others run."""

import logging
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from quire.worker.api.errors import ConstraintRefused, InvalidRequest
from quire.worker.schedule.sequence import Sequence
from quire.worker.text.compile_queue import CompileThreads
from quire.worker.text.grammar import Grammar, Grammars
from quire.worker.text.matcher import Matcher

_log = logging.getLogger(__name__)

_WAIT_S = 0.005
"""How long an engine that has nothing else to do waits before it looks for new requests."""


class Compiling:
    """Belongs to the engine's thread, and has one of its own from the first constraint on."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._thread = CompileThreads(1)
        self._matchers: dict[Sequence, Future[Matcher]] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._matchers

    def add(self, seq: Sequence) -> None:
        """``seq`` has a constraint. It is ready, or refused, at once if its grammar is known and
        its output is not begun."""
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
        self._matchers.pop(seq).cancel()

    def take(self, *, may_wait: bool) -> Iterator[tuple[Sequence, InvalidRequest | None]]:
        """Those that are ready, which have their matchers, and those that are refused, with the
        reason. ``may_wait``: there is nothing else to do."""
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
            seq.matcher = future.result()
            reason = seq.constraint_error()
            return None if reason is None else cannot_go_on(seq, reason)
        if isinstance(error, InvalidRequest):
            return error
        # Whatever it is, it is that request's alone.
        _log.error("a constraint could not be compiled", exc_info=error)
        return InvalidRequest(
            f"structured_outputs could not be compiled: {error!r}", param="structured_outputs"
        )


def cannot_go_on(seq: Sequence, reason: str) -> InvalidRequest:
    """The error of ``seq``, whose constraint allows no next token."""
    constraint = seq.request.sampling.constraint
    assert seq.matcher is not None
    assert constraint is not None
    if seq.matcher.cost.is_spent:
        return ConstraintRefused(f"structured_outputs={constraint.kind}: {reason}")
    return InvalidRequest(
        f"structured_outputs: the output cannot go on behind {seq.num_output_tokens} tokens: "
        f"{reason}",
        param="structured_outputs",
    )
