"""Encodes texts in a child process with limits on time and memory, for tokenizers whose work has no
known bound (`quire.worker.text.tokenizer_work`)."""

import json
import threading
from array import array
from collections.abc import Callable

from quire.worker.request.errors import InvalidRequest
from quire.worker.text.child_process import ChildProcess

IDS, REFUSED = b"I", b"R"
"""First byte of an answer: it has token ids, or a reason for refusal."""
_TIMEOUT_S = 5.0
_TIMEOUT_S_PER_CHAR = 1e-5
"""Ten times the usual time."""
_MEMORY_BYTES = 2 << 30
"""Limit of the address space, most of which is not used; a text of a megabyte takes 200 MB."""


class TokenizerProcess:
    """Encodes one text at a time; concurrent callers wait.

    The process starts with the first text, and starts again after it had to be killed. It ends with
    this object and with the parent process, even by SIGKILL.
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
        """The text's token ids. Raises InvalidRequest: the tokenizer refuses the text, or exceeds a
        limit."""
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
