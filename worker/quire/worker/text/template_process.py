"""Chat templates rendered in a process of their own, with limits of time and memory.

A template is a program, and messages may make it slow. A thread that runs one cannot be ended, and
nothing bounds what it takes; a process can be killed, and the kernel bounds its memory. Whatever a
template does, the process that asked goes on.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from quire.worker.api.errors import ConfigError, InvalidRequest
from quire.worker.text.chat_template import ChatTemplate
from quire.worker.text.template_child import REFUSED, TEXT
from quire.worker.text.tokenizer import Message

_START_TIMEOUT_S = 60.0  # A busy machine takes long to start Python.
_MIN_MEMORY_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits on rendering one chat.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    timeout_s: float = 5.0
    memory_bytes: int = 512 << 20
    """Memory limit of the whole process, Python's own 50 MB included."""
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
    """Renders chats one after another; threads wait for each other.

    The process starts with the first chat, and again after one that had to be ended. It ends with
    this object, and with this process, even by SIGKILL.
    """

    def __init__(self, template: ChatTemplate, limits: TemplateLimits | None = None) -> None:
        self._template = template
        self._limits = limits or TemplateLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TemplateProcess] | None = None

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """As `ChatTemplate.render`, within the limits.

        Raises:
            InvalidRequest: The template refuses the messages, fails on them or exceeds a limit.
        """
        chat = {"messages": messages, **options}
        # As it is: escaped, a character may take twelve bytes.
        request = json.dumps(chat, ensure_ascii=False).encode("utf-8", "replace")
        with self._lock:
            self._ensure_started()
            answer = self._ask(request, timeout_s=self._limits.timeout_s)
        text = answer[1:].decode()
        if answer[:1] == REFUSED:
            raise InvalidRequest(text)
        return text

    def close(self) -> None:
        """Ends the process; a later `render` starts another."""
        if self._end is not None:
            self._end()

    def _ensure_started(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = (theirs.fileno(), self._limits.memory_bytes)
            self._process = subprocess.Popen(
                # -P: the working directory is no place to import from unasked.
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "quire.worker.text.template_child",
                    *map(str, arguments),
                ],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Not in the terminal's foreground group: Ctrl-C is for this process alone.
                process_group=0,
            )
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._socket)
        first = {
            "source": self._template.source,
            "special_tokens": self._template.special_tokens,
            "max_chars": self._limits.max_chars,
            "max_cpu_s": ceil(self._limits.timeout_s) + 1,
        }
        ready = self._ask(json.dumps(first).encode(), timeout_s=_START_TIMEOUT_S)
        assert ready == TEXT, "the template was compiled before"

    def _ask(self, request: bytes, *, timeout_s: float) -> bytes:
        """The answer to one frame. Without one in time, the process is ended."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(request)))
            self._socket.sendall(request)
            (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline_s))
            return self._receive(num_bytes, deadline_s)
        except TimeoutError as error:
            self.close()
            raise InvalidRequest(
                f"the chat template takes more than {timeout_s:g} s for these messages: "
                "send fewer or shorter ones"
            ) from error
        except OSError as error:
            self.close()
            raise InvalidRequest(
                "the chat template refuses these messages: rendering them ended its process"
            ) from error

    def _receive(self, num_bytes: int, deadline_s: float) -> bytes:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining_s)
            num = self._socket.recv_into(view)
            if not num:
                raise ConnectionError("the process is gone")
            view = view[num:]
        return bytes(data)


def _end(owner_pid: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    if os.getpid() == owner_pid:  # And not a forked child of the owner, at its exit.
        process.kill()
        process.wait()
