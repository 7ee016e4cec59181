"""Whether a text's length bounds the work of tokenizing it, whatever a tokenizer's file says.

A file may have a regular expression that takes exponential time, or a normalizer that makes
gigabytes of a line. The work is known to be bounded where every part is of a known kind, a text
grows to `_MAX_GROWTH` times its length at most, and regular expressions try at most one repetition
at each of its lengths: a text takes no more than the square of its length then. The published
tokenizers of language models are like that. Of others nothing is known.
"""

import re
from math import ceil, inf

import tokenizers

from quire.worker.text.bounds import Part, parts_of

_MAX_GROWTH = 64
_MAX_WAYS = 64
"""Ways in which a regular expression may match at one place, besides lengths of repetitions."""
_MAX_TIMES = 64
_MAX_WORD_CHARS = 1000
"""WordPiece looks at all parts of a word."""
# How many characters one can become. NFKC and NFKD make 18 of U+FDFA.
_GROWTH = {
    **{"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12},
    **dict.fromkeys(["ByteLevel", "WordPiece", "BPEDecoder"], 4),
    **dict.fromkeys(["Strip", "StripAccents", "Nmt", "Split", "Metaspace", "Digits"], 1),
    **dict.fromkeys(["Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"], 1),
    **dict.fromkeys(["UnicodeScripts", "CharDelimiterSplit", "ByteFallback", "Fuse", "CTC"], 1),
}

# Atomic, so that reading a pattern does not backtrack in its turn.
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
    """Whether it is known of the text before the model, and of the model."""
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
    """Whether it is known of the tokens' texts behind the model."""
    return _are_bounded(parts_of(backend.decoder, "decoders"))


def matches_in_bounds(pattern: str) -> bool:
    """Whether it is known of a regular expression in Oniguruma's syntax."""
    at, ways, num_tried, num_repeated = 0, 1, 0, 0
    while at < len(pattern):
        part = _PART.match(pattern, at)
        if part is None:  # A repetition within a group, or what few use.
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
        if least:  # Where this does not match, the repetitions before it are tried at each length.
            num_tried, num_repeated = num_tried + num_repeated, 0
        if most > _MAX_TIMES:
            num_repeated += 1
        else:
            ways *= int(most) - least + 1
        if num_tried > 1 or ways > _MAX_WAYS:
            return False
    return True


def _times(part: re.Match[str]) -> tuple[int, float]:
    """How often it must and may be there, one behind the other."""
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
        # What may match nothing does so before each character.
        return max(1, ceil(len(part["content"]) / length)) if length else 1 + len(part["content"])
    return _GROWTH.get(part["type"], inf)
