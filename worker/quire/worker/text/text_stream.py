"""Text that arrives token by token: what can be shown of it yet, and where it stops."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from quire.worker.api.hashing import TokenIds
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.text.tokenizer import Tokenizer


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
        follows: Sequence[int] | TokenIds = (),
        shown_token_ids: Set[int] = frozenset(),
    ) -> None:
        """``follows``: the prompt. ``shown_token_ids``: special tokens that are part of the text
        although it leaves out the others."""
        self._text = tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens,
            shown_token_ids=shown_token_ids,
            follows=follows,
        )
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._num_unstopped = params.min_tokens
        """How many more tokens cannot complete a stop string."""
        self._held = ""  # Text that could be the beginning of a stop string.
        self._stopped = False
        self.stop_string: str | None = None
        """The stop string that ended the text, once one did."""

    def push(self, token_id: int) -> TextDelta:
        """Adds a token; returns the text that is now certain. After a stop, nothing more."""
        if self._stopped:
            return TextDelta("", True)
        text = self._text.push(token_id)
        if self._stops:
            self._num_unstopped -= 1
            text = self._hold_back_stops(text)
        return TextDelta(text, self._stopped)

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if self._stopped:
            return ""
        rest = self._text.finish()
        shown = self._hold_back_stops(rest) if self._stops else rest
        rest, self._held = ("" if self._stopped else self._held), ""
        self._stopped = True
        return shown + rest

    def _hold_back_stops(self, text: str) -> str:
        """Passes ``text`` on, less a tail that may yet become a stop string."""
        num_held = len(self._held)
        text = self._held + text
        found = [
            (start, stop)
            for stop in self._stops
            if stop in text and (start := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
        ]
        if found and self._num_unstopped < 0:
            # The one that is complete first ends the text, however tokens fell together.
            start, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._stopped = True
            self.stop_string = stop
            self._held = ""
            return text[: start + len(stop) if self._keep_stop else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of ``stop``, short of all of it, that ends ``text``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
