"""Computes a lower bound on a text's number of tokens from its length, so that a text that is too
long can be refused without tokenizing it.

A text of ``n`` characters has at least ``n / max_chars`` tokens if every character ends up in a
token and no token stands for more than ``max_chars`` characters. This holds for BPE over bytes and
for BPE with byte fallback. It does not hold if characters are dropped (normalizers that strip,
pre-tokenizers that drop whitespace, characters without a token), or if one token stands for any
number of characters (WordPiece's unknown word, fused unknown characters). Then there is no bound.
If added tokens absorb adjacent whitespace, the bound counts the other characters only.
"""

import json
from math import prod
from typing import Any, NamedTuple

import tokenizers

_PIECE_CHARS = 1 << 16
# How many characters of a text can become one: NFC and NFKC compose at most four.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_SPLITS = {"Digits", "UnicodeScripts", "Split", "Punctuation"}

Part = dict[str, Any]
"""A part of a tokenizer, as ``tokenizer.json`` describes it."""


class TextBound(NamedTuple):
    """The bound for a tokenizer."""

    max_chars: int
    """Most characters that one token stands for."""
    swallows_space: bool
    """Whether whitespace does not count, because a token may absorb any amount of it."""

    def fewest_tokens(self, text: str) -> int:
        """The least number of tokens that ``text`` can have."""
        num_chars = len(text)
        if self.swallows_space:  # In pieces, which limits the number of word objects.
            pieces = (text[i : i + _PIECE_CHARS] for i in range(0, num_chars, _PIECE_CHARS))
            num_chars = sum(len(word) for piece in pieces for word in piece.split())
        return -(-num_chars // self.max_chars)


def text_bound(backend: tokenizers.Tokenizer) -> TextBound | None:
    """The bound for ``backend``; ``None`` if no bound is known."""
    normalizers = parts_of(backend.normalizer, "normalizers")
    pre_tokenizers = parts_of(backend.pre_tokenizer, "pretokenizers")
    shrinks_by = prod(map(_shrinks_by, normalizers))
    if not shrinks_by or not all(map(_keeps_all, pre_tokenizers)) or backend.truncation:
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if not _has_all_characters(backend.model, vocabulary, [*normalizers, *pre_tokenizers]):
        return None
    added = backend.get_added_tokens_decoder().values()
    longest = max(map(len, vocabulary))
    if backend.normalizer is not None:  # An added token may be matched in its normal form.
        forms = (backend.normalizer.normalize_str(token.content) for token in added)
        longest = max(longest, *map(len, forms), 1)
    return TextBound(longest * shrinks_by, any(token.lstrip or token.rstrip for token in added))


def parts_of(step: Any, name: str) -> list[Part]:
    """The parts of a step, with nested sequences flattened."""
    try:
        return [] if step is None else _flat(json.loads(step.__getstate__()), name)
    except Exception:  # A custom step in Python: the library raises no narrower type.
        return [{"type": "unknown"}]


def _flat(state: Part, name: str) -> list[Part]:
    if state["type"] != "Sequence":
        return [state]
    return [part for each in state[name] for part in _flat(each, name)]


def _shrinks_by(normalizer: Part) -> int:
    """How many characters may become one; 0 if that is unbounded or unknown."""
    kind = normalizer["type"]
    if kind != "Replace":
        return 1 if kind == "ByteLevel" else _NORMALIZERS.get(kind, 0)
    pattern, content = normalizer["pattern"].get("String", ""), normalizer["content"]
    return -(-len(pattern) // len(content)) if pattern and content else 0


def _keeps_all(pre_tokenizer: Part) -> bool:
    is_known = pre_tokenizer["type"] in _SPLITS | {"ByteLevel", "Metaspace"}
    return is_known and pre_tokenizer.get("behavior") != "Removed"


def _has_all_characters(model: Any, vocabulary: dict[str, int], steps: list[Part]) -> bool:
    """Whether every character that reaches the model has tokens."""
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # A character's token alone may differ from its token within a word.
    if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) and model.byte_fallback:
        return True
    while steps and steps[-1]["type"] in _SPLITS:
        steps = steps[:-1]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return bool(steps) and steps[-1]["type"] == "ByteLevel" and vocabulary.keys() >= set(alphabet)
