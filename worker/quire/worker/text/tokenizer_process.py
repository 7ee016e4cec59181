"""Texts encoded in a process of their own, with limits of time and memory, for tokenizers whose
work has no known bound (`quire.worker.text.tokenizer_work`)."""

import json
import threading
from array import array
from collections.abc import Callable

from quire.worker.api.errors import InvalidRequest
from quire.worker.text.child_process import ChildProcess

IDS, REFUSED = b"I", b"R"
"""First byte of an answer."""
_TIMEOUT_S = 5.0
_TIMEOUT_S_PER_CHAR = 1e-5
"""Ten times what a text takes."""
_MEMORY_BYTES = 2 << 30
"""Most of it is address space; a text of a megabyte takes 200 MB."""


class TokenizerProcess:
    """Encodes texts one after another; threads wait for each other.

    The process starts with the first text, and again after one that had to be ended. It ends with
    this object, and with this process, even by SIGKILL.
    """

    def __init__(
        self, to_json: Callable[[], str], *, name: str, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child = ChildProcess(
            "quire.worker.text.tokenizer_child",
            lambda: {"tokenizer": to_json(), "name": name},
            memory_bytes=_MEMORY_BYTES,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest: the tokenizer refuses the text, or exceeds a limit over it."""
        request = {"text": text, "add_special_tokens": add_special_tokens}
        timeout_s = self._timeout_s + _TIMEOUT_S_PER_CHAR * len(text)
        about = f"the tokenizer of {self._name} takes more than"
        try:
            with self._lock:
                answer = self._child.ask(json.dumps(request).encode(), timeout_s=timeout_s)
        except TimeoutError:
            reason = f"{about} {timeout_s:.1f} s for a text of {len(text)} characters"
        except OSError:
            reason = f"{about} {_MEMORY_BYTES >> 30} GiB for a text of {len(text)} characters"
        else:
            if answer[:1] == IDS:
                return array("I", answer[1:]).tolist()
            raise InvalidRequest(answer[1:].decode(), param="prompt")
        raise InvalidRequest(f"{reason}: send another text, or token ids", param="prompt")
