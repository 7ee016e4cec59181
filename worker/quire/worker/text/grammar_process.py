"""Constraints checked in a process of their own. `quire.worker.text.work` refuses by a count what
is known to take llguidance long; a time and a memory bound what is not known."""

import json
from dataclasses import asdict

from quire.worker.api.errors import InvalidRequest
from quire.worker.api.structured import Constraint
from quire.worker.text.child_process import ChildProcess
from quire.worker.text.tokenizer import Tokenizer

TIMEOUT_S = 1.0
"""A hundred times what all but a few of a hundred schemas take."""
MEMORY_BYTES = 2 << 30
"""Most of it is address space."""


class GrammarProcess:
    """Compiles constraints one after another; for one thread."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._timeout_s = timeout_s
        self._child = ChildProcess(
            "quire.worker.text.grammar_child",
            lambda: {"tokenizer": tokenizer.to_json(), "vocab_size": vocab_size},
            memory_bytes=MEMORY_BYTES,
        )

    def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest: it means nothing, is not supported or takes too much work."""
        try:
            answer = self._child.ask(
                json.dumps(asdict(constraint)).encode(), timeout_s=self._timeout_s
            )
        except TimeoutError:
            reason = f"compiling it takes more than {self._timeout_s:g} s"
        except OSError:
            reason = "compiling it takes too much memory"
        else:
            if answer:
                raise InvalidRequest(answer.decode(), param="structured_outputs")
            return
        raise InvalidRequest(
            f"structured_outputs={constraint.kind}: {reason}: make it simpler",
            param="structured_outputs",
        )

    def close(self) -> None:
        """Ends the process; a later `check` starts another."""
        self._child.close()
