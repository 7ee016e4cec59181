"""Renders chat templates in a child process with limits on time and memory.

A template is a program, and messages may make it slow.
"""

import json
import reprlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.worker.request.errors import ConfigError, InvalidRequest
from quire.worker.text.child_process import ChildProcess
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.template.child import REFUSED
from quire.worker.text.tokenizer import Message

_MIN_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits on rendering one chat.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    timeout_s: float = 5.0
    memory_bytes: int = 512 << 20
    """Memory limit of the whole process in bytes, including Python's own 50 MB."""
    max_chars: int = 16 << 20
    """Longest rendered text."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= 3600:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: must be above 0, up to 3600 seconds")
        if self.memory_bytes < _MIN_MEMORY_BYTES:
            raise ConfigError(
                f"memory_bytes={self.memory_bytes}: Python needs {_MIN_MEMORY_BYTES} or more"
            )
        if self.max_chars < 1:
            raise ConfigError(f"max_chars={self.max_chars}: must be 1 or more")


class TemplateProcess:
    """Renders one chat at a time; concurrent callers wait.

    The process starts with the first chat, and starts again after it had to be killed. It ends with
    this object and with the parent process, even by SIGKILL.
    """

    def __init__(self, template: ChatTemplate, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        first = {
            "source": template.source,
            "tools_source": template.tools_source,
            "special_tokens": template.special_tokens,
            "max_chars": self._limits.max_chars,
        }
        self._child = ChildProcess(
            "quire.worker.text.template.child",
            lambda: first,
            memory_bytes=self._limits.memory_bytes,
        )

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Renders a chat like `ChatTemplate.render`, within the limits.

        Raises:
            InvalidRequest: The template refuses the messages, fails on them or exceeds a limit.
        """
        chat = {"messages": messages, **options}
        try:  # Not escaped: an escaped character may take twelve bytes.
            text = json.dumps(chat, ensure_ascii=False, default=_as_dict)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"messages: are no JSON: {error}", param="messages") from error
        request = text.encode("utf-8", "replace")
        timeout_s = self._limits.timeout_s
        try:
            with self._lock:
                answer = self._child.ask(request, timeout_s=timeout_s)
        except TimeoutError as error:
            raise InvalidRequest(
                f"the chat template takes more than {timeout_s:g} s for these messages: "
                "send fewer or shorter ones",
                param="messages",
            ) from error
        except OSError as error:
            raise InvalidRequest(
                "the chat template refuses these messages: rendering them ended its process",
                param="messages",
            ) from error
        text = answer[1:].decode()
        if answer[:1] == REFUSED:
            raise InvalidRequest(text, param="messages")
        return text

    def close(self) -> None:
        """Ends the process; a later `render` starts another."""
        self._child.close()


def _as_dict(value: object) -> dict[Any, Any]:
    """For `json.dumps`, which only knows ``dict`` itself."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{reprlib.repr(value)} is of type {type(value).__name__}")
