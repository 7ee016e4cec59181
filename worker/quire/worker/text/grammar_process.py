"""Constraints compiled in a process of their own, with limits of time, memory and stack.

What an honest text takes has no known bound below which hostile ones stay. So this decides which
constraints are compiled elsewhere: for gateways, and for engines whose requests came through none.
"""

import json
import threading
from contextlib import suppress
from dataclasses import asdict

from quire.worker.api.errors import ConstraintRefused
from quire.worker.api.structured import Constraint
from quire.worker.text.child_process import ChildProcess
from quire.worker.text.tokenizer import Tokenizer

MAX_CPU_S, _PATIENCE_S = 1.0, 10.0
"""A hundred times what all but a few of a hundred schemas take, of CPU time and not the clock's: a
busy machine refuses nothing else."""
MEMORY_BYTES = 2 << 30
"""Most of it is address space."""


class GrammarProcess:
    """Compiles constraints one after another; threads wait for each other.

    The process starts with the first constraint, and again, at once, after one that had to be
    ended. It ends with this object, and with this process, even by SIGKILL.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._lock = threading.Lock()
        self._child = ChildProcess(
            "quire.worker.text.grammar_child",
            lambda: {"tokenizer": tokenizer.to_json(), "vocab_size": vocab_size},
            memory_bytes=MEMORY_BYTES,
        )

    def check(self, constraint: Constraint) -> None:
        """Raises ConstraintRefused: it means nothing, is not supported or takes too much work."""
        request = json.dumps(asdict(constraint)).encode()
        try:
            with self._lock:
                answer = self._child.ask(request, timeout_s=_PATIENCE_S, max_cpu_s=MAX_CPU_S)
        except OSError:
            threading.Thread(target=self._start, daemon=True).start()
            raise ConstraintRefused(
                f"structured_outputs={constraint.kind}: compiling it takes more than "
                f"{MAX_CPU_S:g} s or {MEMORY_BYTES >> 30} GiB, or it is nested too deeply: make it "
                "simpler"
            ) from None
        if answer:
            raise ConstraintRefused(answer.decode())

    def close(self) -> None:
        """Ends the process; a later `check` starts another."""
        self._child.close()

    def _start(self) -> None:
        with self._lock, suppress(OSError):
            self._child.start(max_cpu_s=MAX_CPU_S)
