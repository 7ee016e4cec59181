"""The child process of `quire.worker.text.grammar.process`. A request is a constraint; the answer
is why it is refused, or empty. Nothing is cached, so that response times do not reveal the
constraints of others."""

import json
import resource
from collections.abc import Callable
from typing import Any

import tokenizers

from quire.worker.request.errors import InvalidRequest
from quire.worker.request.structured import Constraint
from quire.worker.text.child_process import serve
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer

_STACK_BYTES = 4 << 20
"""Half of the stack of an engine's threads, so that a grammar that is safe here is safe there."""


def _prepare(first: dict[str, Any]) -> Callable[[bytes], bytes]:
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(first["tokenizer"]))
    # The end token does not matter for this check.
    grammars = Grammars(lambda: tokenizer, vocab_size=first["vocab_size"], eos_token_ids=[0])
    grammars.prepare()
    return lambda request: _answer(grammars, request)


def _answer(grammars: Grammars, request: bytes) -> bytes:
    try:
        grammars.check(Constraint(**json.loads(request)))
    except InvalidRequest as error:
        return str(error).encode(errors="replace")
    except MemoryError:
        return b"structured_outputs takes too much memory: send less"
    return b""


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, _STACK_BYTES))
    serve(_prepare)
