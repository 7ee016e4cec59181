"""A lower bound on a text's tokens from its length, so that a text that is too long need not be
read.

A text of ``n`` characters has ``n / max_chars`` tokens or more where every character ends up in a
token and no token stands for more than ``max_chars`` of them. That holds for BPE over bytes and
for BPE that falls back to bytes. It does not where characters are taken away (normalizers that
strip, pre-tokenizers that drop whitespace, characters without a token) or where one token stands
for any number of them (WordPiece's unknown word, unknown characters that are fused into one).
There nothing is said. Added tokens that swallow the whitespace beside them leave it said of all
other characters.
"""

import json
from math import prod
from typing import Any, NamedTuple

import tokenizers

_PIECE_CHARS = 1 << 16
# How many characters of a text can become one: NFC and NFKC compose four at most.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_SPLITS = {"Digits", "UnicodeScripts", "Split", "Punctuation"}

Part = dict[str, Any]
"""A part of a tokenizer, as ``tokenizer.json`` describes it."""


class TextBound(NamedTuple):
    """Bounds that hold for a tokenizer."""

    max_chars: int
    """Characters that one token stands for, at most."""
    swallows_space: bool
    """Whitespace does not count: any amount of it may go with a token."""

    def fewest_tokens(self, text: str) -> int:
        """``text`` has at least as many tokens."""
        num_chars = len(text)
        if self.swallows_space:  # In pieces, since each word is an object.
            pieces = (text[i : i + _PIECE_CHARS] for i in range(0, num_chars, _PIECE_CHARS))
            num_chars = sum(len(word) for piece in pieces for word in piece.split())
        return -(-num_chars // self.max_chars)


def text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """The bound that holds for ``backend``; ``None`` where none is known to hold."""
    normalizers = parts(backend.normalizer, "normalizers")
    pre_tokenizers = parts(backend.pre_tokenizer, "pretokenizers")
    shrinks_by = prod(map(_shrinks_by, normalizers))
    if not shrinks_by or not all(map(_keeps_all, pre_tokenizers)) or backend.truncation:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _has_all_characters(backend.model, vocabulary, [*normalizers, *pre_tokenizers]):
        return None
    added = backend.get_added_tokens_decoder().values()
    longest = max(map(len, vocabulary))
    if backend.normalizer is not None:  # An added token may be looked for in its normal form.
        forms = (backend.normalizer.normalize_str(token.content) for token in added)
        longest = max(longest, *map(len, forms), 1)
    return TextBound(longest * shrinks_by, any(token.lstrip or token.rstrip for token in added))


def parts(step: Any, name: str) -> list[Part]:
    """The steps of which ``step`` is made, one after another."""
    try:
        return [] if step is None else _flat(json.loads(step.__getstate__()), name)
    except Exception:  # Written in Python by someone: the library raises no narrower type.
        return [{"type": "unknown"}]


def _flat(state: Part, name: str) -> list[Part]:
    if state["type"] != "Sequence":
        return [state]
    return [part for each in state[name] for part in _flat(each, name)]


def _shrinks_by(normalizer: Part) -> int:
    """How many characters may become one; 0 where that has no bound or is not known."""
    kind = normalizer["type"]
    if kind != "Replace":
        return 1 if kind == "ByteLevel" else _NORMALIZERS.get(kind, 0)
    pattern, content = normalizer["pattern"].get("String", ""), normalizer["content"]
    return -(-len(pattern) // len(content)) if pattern and content else 0


def _keeps_all(pre_tokenizer: Part) -> bool:
    is_known = pre_tokenizer["type"] in _SPLITS | {"ByteLevel", "Metaspace"}
    return is_known and pre_tokenizer.get("behavior") != "Removed"


def _has_all_characters(model: Any, vocabulary: dict[str, int], steps: list[Part]) -> bool:
    """Whether each character that reaches the model has tokens of its own."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # Those of a character alone are not those within a word.
    if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) and model.byte_fallback:
        return True
    while steps and steps[-1]["type"] in _SPLITS:
        steps = steps[:-1]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return bool(steps) and steps[-1]["type"] == "ByteLevel" and vocabulary.keys() >= set(alphabet)
