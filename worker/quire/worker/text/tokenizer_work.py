"""Decides whether a text's length bounds the work of tokenizing it, given a tokenizer's file.

A file may have a regular expression that takes exponential time, or a normalizer that expands a
line to gigabytes. The work is known to be bounded if every part is of a known kind, a text grows to
at most `_MAX_GROWTH` times its length, and regular expressions try at most one repetition at each
of its lengths. Then the time is at most quadratic in the text's length. The published tokenizers of
language models satisfy this. For others, no bound is known.
"""

import re
from math import ceil, inf

import tokenizers

from quire.worker.text.bounds import Part, parts_of

_MAX_GROWTH = 64
_MAX_WAYS = 64
"""Most ways in which a regular expression may match at one position, apart from the lengths of
repetitions."""
_MAX_TIMES = 64
_MAX_WORD_CHARS = 1000
"""Longest word for WordPiece, which tries all parts of a word."""
# How many characters one character can become. NFKC and NFKD expand U+FDFA to 18.
_GROWTH = {
    **{"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12},
    **dict.fromkeys(["ByteLevel", "WordPiece", "BPEDecoder"], 4),
    **dict.fromkeys(["Strip", "StripAccents", "Nmt", "Split", "Metaspace", "Digits"], 1),
    **dict.fromkeys(["Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"], 1),
    **dict.fromkeys(["UnicodeScripts", "CharDelimiterSplit", "ByteFallback", "Fuse", "CTC"], 1),
}

# Atomic groups, so that parsing a pattern does not backtrack itself.
_IN_CLASS = r"(?:\\.|[^\[\]\\])"
_ATOM = (
    rf"(?>\[\^?+\]?+(?>{_IN_CLASS}|\[{_IN_CLASS}++\])*+\]"
    r"|\\[pPx]\{[^}]*+\}|\\[^1-9gkKGXRy]|\(\?[imx-]++\)|[^\\()\[\]{}?*+|])"
)
_PART = re.compile(
    rf"(?:{_ATOM}|\((?:\?(?:[imx-]*:|>|<?[=!]))?+(?P<group>(?:{_ATOM}|[|?])*+)\))"
    r"(?:(?P<repeat>[?*+])|\{(?P<least>\d+)(?P<most>,\d*)?\})?[?+]?"
    r"|(?P<or>\|)",
    re.DOTALL,
)


def encodes_in_bounds(backend: tokenizers.Tokenizer) -> bool:
    """Whether the work of normalizers, pre-tokenizers and the model is known to be bounded."""
    model = backend.model
    if isinstance(model, tokenizers.models.WordPiece):
        if model.max_input_chars_per_word > _MAX_WORD_CHARS:
            return False
    elif not isinstance(
        model, tokenizers.models.BPE | tokenizers.models.Unigram | tokenizers.models.WordLevel
    ):
        return False
    normalizers = parts_of(backend.normalizer, "normalizers")
    return _are_bounded([*normalizers, *parts_of(backend.pre_tokenizer, "pretokenizers")])


def decodes_in_bounds(backend: tokenizers.Tokenizer) -> bool:
    """Whether the work of the decoder is known to be bounded."""
    return _are_bounded(parts_of(backend.decoder, "decoders"))


def matches_in_bounds(pattern: str) -> bool:
    """Whether the work of a regular expression in Oniguruma's syntax is known to be bounded."""
    at, ways, num_tried, num_repeated = 0, 1, 0, 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None:  # A repetition within a group, or rare syntax.
            return False
        at = part.end()
        if part["or"]:
            ways, num_tried, num_repeated = 1, 0, 0
            continue
        least, most = _times(part)
        if part["group"] is not None:
            ways *= (1 + part["group"].count("|")) * 2 ** part["group"].count("?")
            if most > 1:
                return False
        if least:  # If this does not match, the repetitions before it are tried at each length.
            num_tried, num_repeated = num_tried + num_repeated, 0
        if most > _MAX_TIMES:
            num_repeated += 1
        else:
            ways *= int(most) - least + 1
        if num_tried > 1 or ways > _MAX_WAYS:
            return False
    return True


def _times(part: re.Match[str]) -> tuple[int, float]:
    """The least and greatest number of repetitions of a part."""
    if part["repeat"]:
        return int(part["repeat"] == "+"), 1 if part["repeat"] == "?" else inf
    least = int(part["least"] or 1)
    most = (part["most"] or f",{least}")[1:]
    return least, int(most) if most else inf


def _are_bounded(parts: list[Part]) -> bool:
    growth = 1.0
    for part in parts:
        pattern = part.get("pattern", {})
        if "Regex" in pattern and not matches_in_bounds(pattern["Regex"]):
            return False
        growth *= _growth(part)
    return growth <= _MAX_GROWTH


def _growth(part: Part) -> float:
    if part["type"] == "Prepend":
        return 1 + len(part["prepend"])
    if part["type"] == "Replace":
        length = len(part["pattern"].get("String", ""))
        # A pattern that can match the empty string does so before each character.
        return max(1, ceil(len(part["content"]) / length)) if length else 1 + len(part["content"])
    return _GROWTH.get(part["type"], inf)
