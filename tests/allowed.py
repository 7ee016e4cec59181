"""Whether a constraint allows a text."""

from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer


def allows(grammars: Grammars, marked: Tokenizer, constraint: Constraint | None, text: str) -> bool:
    """Whether ``constraint`` allows ``text`` as a whole answer, one that may end there."""
    assert constraint is not None
    matcher = grammars.compile(constraint).matcher()
    for token_id in marked.encode(text, add_special_tokens=False):
        if not matcher.mask_W[token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.consume([token_id])
        matcher.fill()
    return matcher.error is None and bool(matcher.mask_W[0] & 1)
