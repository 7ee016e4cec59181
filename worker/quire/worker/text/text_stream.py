"""Text that arrives token by token: what can be shown of it yet, and where it stops."""

import codecs
from collections.abc import Set
from typing import NamedTuple, Protocol

from quire.worker.api.sampling_params import SamplingParams
from quire.worker.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A tokenizer may decode a token differently at the start of a text (a space is dropped), so new
# tokens are decoded behind a few old ones: as few as these again once they are as many as those.
_MIN_CONTEXT_TOKENS = 4
_MAX_CONTEXT_TOKENS = 16
# A model that emits nothing but broken UTF-8 must not make each token cost more than the last.
_MAX_UNFINISHED_TOKENS = 64


class TextDelta(NamedTuple):
    text: str
    """Text that can be shown now: never the beginning of a stop string, never half a character."""
    stopped: bool
    """A stop string is complete: the request is at its end."""


class TextStream:
    """The text of one request, from tokens that arrive a few at a time.

    All deltas joined, with `finish`, are the decoded text up to the first stop string, however
    the tokens were divided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        shown_token_ids: Set[int] = frozenset(),
    ) -> None:
        """``shown_token_ids``: special tokens that are part of the text although it leaves out the
        others."""
        self._tokenizer = tokenizer
        self._shown_token_ids = shown_token_ids if params.skip_special_tokens else frozenset()
        decoder = _ByteDecoder if tokenizer.is_byte_level else _WindowDecoder
        self._decoder: _Decoder = decoder(tokenizer, params.skip_special_tokens)
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._held = ""  # Text that could be the beginning of a stop string.
        self._stopped = False
        self.stop_string: str | None = None
        """The stop string that ended the text, once one did."""

    def push(self, token_id: int) -> TextDelta:
        """Adds a token; returns the text that is now certain. After a stop, nothing more."""
        if self._stopped:
            return TextDelta("", True)
        if token_id in self._shown_token_ids:
            text = self._decoder.finish() + self._tokenizer.token_text(token_id)
        else:
            text = self._decoder.push(token_id)
        if self._stops:
            text = self._hold_back_stops(text)
        return TextDelta(text, self._stopped)

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if self._stopped:
            return ""
        rest = self._decoder.finish()
        shown = self._hold_back_stops(rest) if self._stops else rest
        rest, self._held = ("" if self._stopped else self._held), ""
        self._stopped = True
        return shown + rest

    def _hold_back_stops(self, text: str) -> str:
        """Passes ``text`` on, less a tail that may yet become a stop string."""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The one that is complete first ends the text, however tokens fell together.
            start, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._stopped = True
            self.stop_string = stop
            self._held = ""
            return text[: start + len(stop) if self._keep_stop else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class _Decoder(Protocol):
    """Tokens to text, as `Tokenizer.decode` has it."""

    def push(self, token_id: int) -> str:
        """The text that is certain with this token, behind what was."""

    def finish(self) -> str:
        """The rest, half a character included. More tokens may follow."""


class _ByteDecoder:
    """For byte-level vocabularies."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any tokenizer: decodes the last tokens together, once for each new one."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # Context tokens, then those that are not shown whole.
        self._num_context = 0
        self._shown = ""  # What went out of the window's text.

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text()
        stable = text.rstrip(_REPLACEMENT) if text.endswith(_REPLACEMENT) else text
        unfinished = len(stable) < len(text)
        too_long = len(self._window) - self._num_context > _MAX_UNFINISHED_TOKENS
        if unfinished and not too_long:
            # Characters of one to four bytes can end in the middle; the next token may tell.
            new = stable[len(self._shown) :]
            self._shown += new
            return new
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._text())

    def _show(self, text: str) -> str:
        """All of the window, whose text is ``text``, is shown, and is context from now on."""
        new, self._shown = text[len(self._shown) :], text
        if len(self._window) > _MAX_CONTEXT_TOKENS:
            self._window = self._window[-_MIN_CONTEXT_TOKENS:]
            self._shown = self._text()
        self._num_context = len(self._window)
        return new

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of ``stop``, short of all of it, that ends ``text``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
