"""The incremental detokenizer: token ids to text, one token at a time.

A token's *piece* is the bytes that it adds to a text. A text is its tokens' pieces, joined and
decoded as UTF-8, with U+FFFD in place of invalid bytes. The tokenizer's own decoder gives the same
text for all tokens at once, with one exception: if a run of byte tokens is not valid UTF-8, for
example when an output ends within a character, that decoder replaces each byte of the run by
U+FFFD. Here the complete characters of the run stay, since they may have been shown before.

Pieces are computed with the tokenizer's own decoder, a chain of steps. The steps before tokens are
joined depend on one token, and on whether it is the first or the last one. The steps after that may
only strip the beginning of the text.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence, Set

import tokenizers

from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.errors import CheckpointError
from quire.worker.text.bounds import Part, parts_of

_PROBE = "a"
"""A token that no step changes."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEPS_OF_A_TOKEN = {"Replace", "Strip", "Metaspace", "WordPiece", "BPEDecoder", "ByteFallback"}
_JOINS = {"Fuse", "ByteLevel"}


def _byte_alphabet() -> dict[str, int]:
    """The bytes by the characters that represent them in a byte-level vocabulary, as in GPT-2.

    A printable byte is represented by its own character, the others by characters from 256 on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printed)
    return {chr(byte): byte for byte in printed} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


class Pieces:
    """The pieces of a tokenizer's tokens. The piece of an unknown id is empty."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Raises CheckpointError if the decoder cannot be applied token by token."""
        self._token = backend.id_to_token
        steps = parts_of(backend.decoder, "decoders")
        kinds = [step["type"] for step in steps]
        join = next((place for place, kind in enumerate(kinds) if kind in _JOINS), len(steps))
        behind = [step for step in steps[join + 1 :] if step["type"] != "Fuse"]
        is_known = _STEPS_OF_A_TOKEN.issuperset(kinds[:join]) and (
            not behind or (len(behind) == 1 and _strips_start(behind[0]))
        )
        if not is_known:
            raise CheckpointError(
                f"the tokenizer's decoder ({', '.join(kinds)}) is not supported: texts must come "
                "of it token by token"
            )
        self._is_byte_level = "ByteLevel" in kinds
        self.has_byte_fallback = "ByteFallback" in kinds
        self._spell: Callable[[list[str]], str]
        self._spell = " ".join if backend.decoder is None else _speller(steps[:join])
        self.leading = behind[0]["content"].encode() if behind else b""
        """Bytes that are stripped from a text's beginning, up to ``num_leading`` times."""
        self.num_leading: int = behind[0]["start"] if behind else 0
        self.has_gaps = "BPEDecoder" in kinds
        """Whether `gap` may return bytes."""
        self.later = _Later(self._later)
        """The pieces of tokens that are not the first of a text."""
        self.is_plain = not (self.num_leading or backend.decoder is None or kinds[:join])
        """Whether pieces are independent of their position."""

    def first(self, token_id: int) -> bytes:
        """The piece of a text's first token, before anything is stripped."""
        token = self._token(token_id) or ""
        return self._bytes(token, self._spell([token]))

    def gap(self, token_id: int) -> bytes:
        """The bytes that a token adds when another token follows it, such as a space."""
        if not self.has_gaps:
            return b""
        token = self._token(token_id) or ""
        alone, followed = self._spell([_PROBE, token]), self._spell([_PROBE, token, _PROBE])
        return followed.removesuffix(_PROBE).removeprefix(alone).encode()

    def knows(self, token_id: int) -> bool:
        return self._token(token_id) is not None

    def _later(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        spelled = self._spell([_PROBE, token])
        return self._bytes(token, spelled.removeprefix(self._spell([_PROBE])))

    def _bytes(self, token: str, spelled: str) -> bytes:
        if self.has_byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self._is_byte_level and all(character in _BYTES for character in spelled):
            return bytes(_BYTES[character] for character in spelled)
        return spelled.encode()  # An added token, if the vocabulary is byte-level.


class Detokenizer:
    """Decodes one text whose tokens arrive one by one."""

    def __init__(
        self,
        pieces: Pieces,
        *,
        skipped: Set[int] = frozenset(),
        follows: Sequence[int] | TokenIds = (),
    ) -> None:
        """``skipped`` are tokens that do not appear in the text. ``follows`` are the tokens before
        it; they determine whether the text begins with the space before its first word."""
        self.skipped = skipped
        self._pieces = pieces
        self._later = pieces.later
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._num_leading = pieces.num_leading
        self._gap = b""
        self._is_plain = pieces.is_plain
        if not self._is_plain:
            self._follow(follows)

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that is now certain: never a partial character."""
        if token_id in self.skipped:
            return ""
        piece = self._later[token_id] if self._is_plain else self._take(token_id)
        return self._utf8.decode(piece)

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token would add now; empty for a skipped token."""
        if token_id in self.skipped:
            return b""
        return self._later[token_id] if self._is_plain else self._placed(token_id)[0]

    def finish(self) -> str:
        """The rest of the text: U+FFFD for a partial character."""
        return self._utf8.decode(b"", final=True)

    def _follow(self, token_ids: Sequence[int] | TokenIds) -> None:
        for token_id in token_ids:
            if not (self._is_first or self._num_leading):
                break
            if token_id not in self.skipped:
                self._take(int(token_id))
        if self._pieces.has_gaps:
            last = next((each for each in reversed(token_ids) if each not in self.skipped), None)
            self._gap = b"" if last is None else self._pieces.gap(int(last))

    def _take(self, token_id: int) -> bytes:
        piece, num_leading = self._placed(token_id)
        if self._pieces.knows(token_id):
            self._is_first, self._num_leading = False, num_leading
            self._gap = self._pieces.gap(token_id)
            self._is_plain = not (num_leading or self._pieces.has_gaps)
        return piece

    def _placed(self, token_id: int) -> tuple[bytes, int]:
        """A token's piece at this position, and how often the text may still be stripped then."""
        piece = self._pieces.first(token_id) if self._is_first else self._later[token_id]
        left, leading = self._num_leading, self._pieces.leading
        while left and piece.startswith(leading):
            piece, left = piece[len(leading) :], left - 1
        gap = self._gap if self._pieces.knows(token_id) else b""
        return gap + piece, 0 if piece else left


def readable(piece: bytes) -> str:
    """A piece's text, or its bytes in OpenAI's notation if it is not valid UTF-8 by itself."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class _Later(dict[int, bytes]):
    """A cache of pieces that computes missing ones."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


def _strips_start(step: Part) -> bool:
    return bool(step["type"] == "Strip" and step["stop"] == 0)


def _speller(steps: list[Part]) -> Callable[[list[str]], str]:
    """Returns a function that decodes tokens to text with ``steps``, without byte fallback."""
    steps = [step for step in steps if step["type"] != "ByteFallback"]
    if not steps:
        return "".join
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    made = tokenizers.Tokenizer.from_str(
        json.dumps(empty | {"decoder": {"type": "Sequence", "decoders": steps}})
    )
    spell: Callable[[list[str]], str] = made.decoder.decode
    return spell
