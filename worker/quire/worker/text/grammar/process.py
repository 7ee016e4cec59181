"""Checks constraints by compiling them in a child process with limits on time, memory and stack.

No property of a text is known that bounds the cost of its compilation. So this test decides which
constraints are compiled in other processes. Gateways use it, and engines without a gateway.
"""

import json
import threading
from contextlib import suppress
from dataclasses import asdict

from quire.worker.request.errors import ConstraintRefused
from quire.worker.request.structured import Constraint
from quire.worker.text.child_process import ChildProcess
from quire.worker.text.tokenizer import Tokenizer

MAX_CPU_S, _PATIENCE_S = 1.0, 10.0
"""Limits on CPU time and on the wait. The CPU time is a hundred times what all but a few of a
hundred schemas take. It is not wall time, so that a busy machine refuses no other constraints."""
MEMORY_BYTES = 2 << 30
"""Limit of the address space, most of which is not used."""


class GrammarProcess:
    """Compiles one constraint at a time; concurrent callers wait.

    The process starts with the first constraint, and starts again at once after it had to be
    killed. It ends with this object and with the parent process, even by SIGKILL.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._lock = threading.Lock()
        self._child = ChildProcess(
            "quire.worker.text.grammar.child",
            lambda: {"tokenizer": tokenizer.to_json(), "vocab_size": vocab_size},
            memory_bytes=MEMORY_BYTES,
        )

    def check(self, constraint: Constraint) -> None:
        """Raises ConstraintRefused if it is invalid, not supported or too expensive."""
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
