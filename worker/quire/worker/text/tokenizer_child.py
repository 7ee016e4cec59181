"""The child process of `quire.worker.text.tokenizer_process`. A request is a text; the answer is
its token ids, or why there are none."""

import json
import os
from array import array
from collections.abc import Callable
from typing import Any

import tokenizers

from quire.worker.request.errors import InvalidRequest
from quire.worker.text.child_process import serve
from quire.worker.text.tokenizer import encode
from quire.worker.text.tokenizer_process import IDS, REFUSED


def _prepare(first: dict[str, Any]) -> Callable[[bytes], bytes]:
    os.environ["RAYON_NUM_THREADS"] = "1"  # Each thread takes address space, which is limited.
    backend = tokenizers.Tokenizer.from_str(first["tokenizer"])
    return lambda request: _answer(backend, request, name=first["name"])


def _answer(backend: tokenizers.Tokenizer, request: bytes, *, name: str) -> bytes:
    try:
        return IDS + array("I", encode(backend, **json.loads(request), name=name)).tobytes()
    except InvalidRequest as error:
        return REFUSED + str(error).encode(errors="replace")


if __name__ == "__main__":
    serve(_prepare)
