"""Streams text from tokens: finds the text that can be shown yet, and stop strings."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from quire.worker.blocks.hashing import TokenIds, as_token_ids
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.text.reasoning import ReasoningFormat
from quire.worker.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    text: str
    """Text that can be shown now. It never ends with the beginning of a stop string, or within a
    character."""
    stopped: bool
    """Whether a stop string is complete, which ends the request."""


class TextStream:
    """The text of one request, from tokens that arrive a few at a time.

    All deltas and `finish`, concatenated, are the decoded text up to the first stop string,
    however the tokens were split into deltas.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        follows: Sequence[int] | TokenIds = (),
        shown_token_ids: Set[int] = frozenset(),
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        """``follows`` is the prompt. ``shown_token_ids`` are special tokens that appear in the text
        although other special tokens do not. Stop strings are not looked for in ``reasoning``."""
        self._text = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=shown_token_ids,
            follows=follows,
        )
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._num_unstopped = params.min_tokens
        """How many of the next tokens cannot complete a stop string."""
        self._reasoning = None
        if reasoning is not None and self._stops:
            begun = reasoning.begun(tokenizer, as_token_ids(follows))
            self._reasoning = None if begun is False else _Reasoning(reasoning, begun=bool(begun))
        self._held = ""  # Text that could be the beginning of a stop string.
        self._stopped = False
        self.stop_string: str | None = None
        """The stop string that ended the text, once one did."""

    def push(self, token_id: int) -> TextDelta:
        """Adds a token. Returns the text that is now certain; empty after a stop."""
        if self._stopped:
            return TextDelta("", True)
        text = self._text.push(token_id)
        if self._stops:
            self._num_unstopped -= 1
            text = self._searched(text)
        return TextDelta(text, self._stopped)

    def finish(self) -> str:
        """The rest of the text. Called after the last token."""
        if self._stopped:
            return ""
        rest = self._text.finish()
        shown = self._searched(rest, is_last=True) if self._stops else rest
        rest, self._held = ("" if self._stopped else self._held), ""
        self._stopped = True
        return shown + rest

    def _searched(self, text: str, *, is_last: bool = False) -> str:
        """Returns the part of ``text`` that can be shown, and holds back the rest."""
        reasoned = ""
        if self._reasoning is not None:
            reasoned, text = self._reasoning.push(text, is_last=is_last)
            if self._reasoning.is_over:
                self._reasoning = None
        return reasoned + self._hold_back_stops(text)

    def _hold_back_stops(self, text: str) -> str:
        """Returns ``text`` without a tail that may become a stop string."""
        num_held = len(self._held)
        text = self._held + text
        found = [
            (start, stop)
            for stop in self._stops
            if stop in text and (start := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        if found and self._num_unstopped < 0:
            # The stop string that is complete first ends the text, however tokens are grouped.
            start, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._stopped = True
            self.stop_string = stop
            self._held = ""
            return text[: start + len(stop) if self._keep_stop else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class _Reasoning:
    """The reasoning at the beginning of a text."""

    def __init__(self, marks: ReasoningFormat, *, begun: bool) -> None:
        self._marks = marks
        self._is_begun = begun
        self._held = ""
        self.is_over = False

    def push(self, text: str, *, is_last: bool) -> tuple[str, str]:
        """Returns the text that belongs to the reasoning, and the text behind it."""
        text, self._held = self._held + text, ""
        if not self._is_begun:
            start, opens = text.lstrip(), self._marks.opens
            if not is_last and len(start) < len(opens) and opens.startswith(start):
                self._held = text
                return "", ""
            self._is_begun = start.startswith(opens)
            self.is_over = not self._is_begun
        if self.is_over:
            return "", text
        before, closes, behind = text.partition(self._marks.closes)
        if closes:
            self.is_over = True
            return before + closes, behind
        num_held = 0 if is_last else _overlap(text, self._marks.closes)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], ""


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
