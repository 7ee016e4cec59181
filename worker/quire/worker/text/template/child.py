"""The child process of `quire.worker.text.template.process`. A request is a chat; the answer is the
rendered text, or why there is none."""

import json
from collections.abc import Callable
from typing import Any

from quire.worker.request.errors import QuireError
from quire.worker.text.child_process import serve
from quire.worker.text.template.chat_template import ChatTemplate

TEXT, REFUSED = b"T", b"R"
"""First byte of an answer: it is a text, or a reason for refusal."""


def _prepare(first: dict[str, Any]) -> Callable[[bytes], bytes]:
    max_chars = first["max_chars"]
    template = ChatTemplate(
        first["source"],
        special_tokens=first["special_tokens"],
        tools_source=first["tools_source"],
    )
    return lambda request: _answer(template, request, max_chars=max_chars)


def _answer(template: ChatTemplate, request: bytes, *, max_chars: int) -> bytes:
    try:
        text = template.render(**json.loads(request))
        if len(text) <= max_chars:
            return TEXT + text.encode()
        reason = f"it makes {len(text)} characters of them, at most {max_chars} are allowed"
    except QuireError as error:
        return REFUSED + str(error).encode(errors="replace")
    except (MemoryError, ValueError) as error:  # While reading, or writing a lone surrogate.
        reason = type(error).__name__
    return REFUSED + f"the chat template refuses these messages: {reason}".encode()


if __name__ == "__main__":
    serve(_prepare)
