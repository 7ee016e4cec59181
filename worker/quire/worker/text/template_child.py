"""The process in which `quire.worker.text.template_process` renders: ``FD MEMORY_BYTES``.

Frames go both ways over a socket: four bytes of length, little-endian, and as many of data. The
first frame that comes is the template, each one behind it a chat; each is answered, by the text or
by why there is none. The process ends with the socket.
"""

import json
import os
import resource
import struct
import sys
from typing import BinaryIO

from quire.worker.api.errors import QuireError
from quire.worker.text.chat_template import ChatTemplate

TEXT, REFUSED = b"T", b"R"
"""First byte of an answer."""
_LENGTH = struct.Struct("<I")


def main() -> None:
    fd, memory_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(fd, "rb") as requests, os.fdopen(os.dup(fd), "wb") as answers:
        first = json.loads(_read(requests) or b"{}")
        if not first:
            return
        max_chars, max_cpu_s = first["max_chars"], first["max_cpu_s"]
        template = ChatTemplate(first["source"], special_tokens=first["special_tokens"])
        _write(answers, TEXT)
        while request := _read(requests):
            # For when no one is left to end it. The limit counts whole seconds of the process.
            used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (used_s + max_cpu_s, hard))
            _write(answers, _answer(template, request, max_chars=max_chars))


def _answer(template: ChatTemplate, request: bytes, *, max_chars: int) -> bytes:
    try:
        text = template.render(**json.loads(request))
        if len(text) <= max_chars:
            return TEXT + text.encode()
        reason = f"it makes {len(text)} characters of them, at most {max_chars} are allowed"
    except QuireError as error:
        return REFUSED + str(error).encode(errors="replace")
    except (MemoryError, ValueError) as error:  # As it was read, or half a character written.
        reason = type(error).__name__
    return REFUSED + f"the chat template refuses these messages: {reason}".encode()


def _read(file: BinaryIO) -> bytes:
    """The next frame; empty at the end."""
    header = file.read(_LENGTH.size)
    return file.read(*_LENGTH.unpack(header)) if len(header) == _LENGTH.size else b""


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


if __name__ == "__main__":
    main()
