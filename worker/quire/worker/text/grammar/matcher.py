"""Tracks the place of an output in its grammar, which determines the tokens that may follow.

A `Matcher` advances token by token. Each place has a mask, which takes time to compute: until
`Matcher.fill` has done so, in any thread, the place is not ready. Matchers of one grammar that
consumed the same tokens can share a `Place`, so that one of them computes the mask for all.
"""

import itertools
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.arrays import Ints
from quire.worker.text.grammar.mask_cost import MaskCost

if TYPE_CHECKING:  # Imported when needed: most processes never get a constraint.
    from llguidance import LLExecutor, LLMatcher

# W words of 32 tokens

_MAX_ERROR_CHARS = 400
_MAX_FORCED_WORDS = 16
"""If more words of a mask have a bit set, no text is forced: few tokens begin the same text."""

_NO_TOKEN = 2**31 - 1
_SHORT_S = 0.005

_numbers = itertools.count()
Key = tuple[int, tuple[int, ...]]


class Place:
    """The tokens that may follow an output. Written by the thread that fills it; constant once it
    is ready."""

    def __init__(self, num_words: int, key: Key | None = None) -> None:
        self.key = key
        """Number of an earlier place, and the tokens from there to this place."""
        self.number = next(_numbers)
        self.mask_W: Ints = np.zeros(num_words, np.int32)
        """Bit ``t % 32`` of word ``t // 32`` allows token ``t``. End tokens are allowed if the
        output may end; if it must end, no others are."""
        self.error: str | None = None
        """Why the output cannot continue: usually, the mask exceeds llguidance's limits."""
        self.is_ready = False

    def behind(self, token_ids: tuple[int, ...]) -> "Place":
        if self.is_ready or self.key is None:
            return Place(len(self.mask_W), (self.number, token_ids))
        return Place(len(self.mask_W), (self.key[0], self.key[1] + token_ids))


class Matcher:
    """Tracks which tokens may follow an output. Not thread-safe."""

    def __init__(self, state: "LLMatcher", place: Place, cost: MaskCost) -> None:
        self._state = state
        self._unread: list[int] = []
        self.place = place
        self.cost = cost

    @property
    def is_ready(self) -> bool:
        return self.place.is_ready

    @property
    def mask_W(self) -> Ints:
        assert self.place.is_ready
        return self.place.mask_W

    @property
    def error(self) -> str | None:
        return self.place.error

    @property
    def num_unread(self) -> int:
        """Tokens that `fill` consumes before it computes the mask."""
        return len(self._unread)

    def consume(self, token_ids: Sequence[int] | TokenIds) -> None:
        """Advances by allowed tokens, to a place that is not ready."""
        if self.error is None and len(token_ids):
            read = tuple(int(each) for each in token_ids)
            self._unread += read
            self.place = self.place.behind(read)

    def fill(self, *, is_slow: bool = False) -> float:
        """Makes its place ready. Returns the CPU time that it took, in seconds.

        ``is_slow``: its grammar is slow, so the GIL is released while it consumes tokens. Without
        that, it is 50 µs faster.
        """
        place = self.place
        if place.is_ready:
            return 0.0
        free_s = 0.0
        began_s = time.thread_time()
        try:
            if is_slow:
                free_s = self._take_in_freely()
            self._take_in()
            if not self._state.is_error():
                self._state.unsafe_compute_mask_ptr(place.mask_W.ctypes.data, place.mask_W.nbytes)
            if self._state.is_error():
                place.error = cut(self._state.get_error())
        except BaseException as error:  # A panic in llguidance is not an Exception.
            place.error = cut(repr(error))
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
        finally:
            place.is_ready = True
        return time.thread_time() - began_s + free_s

    def forced(self) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer splits it; a model may split it
        differently. Often none."""
        if self.error is not None or np.count_nonzero(self.mask_W) > _MAX_FORCED_WORDS:
            return []
        self._take_in()
        forced: list[int] = self._state.deep_copy().compute_ff_tokens()
        return forced

    def masks_behind(self, token_ids: Sequence[int]) -> list[Ints]:
        """The masks after each of ``token_ids``, as long as these are allowed themselves. This
        matcher does not advance."""
        self._take_in()
        ahead = Matcher(self._state.deep_copy(), self.place, self.cost)
        masks = []
        for token_id in token_ids:
            ahead.consume((token_id,))
            ahead.fill()
            if ahead.error is not None:
                break
            masks.append(ahead.mask_W)
        return masks

    def _take_in(self) -> None:
        if self._unread:
            self._state.consume_tokens(self._unread)
            self._unread.clear()

    def _take_in_freely(self) -> float:
        """`_take_in` without the GIL. llguidance releases it only to consume tokens of several
        matchers, so this also passes an ended matcher that consumes none. Returns CPU seconds."""
        began = time.perf_counter(), time.process_time()
        for token_id in self._unread:
            ended = self._state.deep_copy()
            ended.consume_token(_NO_TOKEN)
            if not _executor().consume_token_par([(self._state, token_id), (ended, 0)])[0]:
                break
        self._unread.clear()
        # The work ran in another thread: takes the lower of two upper bounds of its time, which
        # are too inaccurate for short times.
        taken_s = min(time.perf_counter() - began[0], time.process_time() - began[1])
        return taken_s if taken_s > _SHORT_S else 0.0


def cut(error: str) -> str:
    """The part of llguidance's ``error`` that clients receive."""
    error = error.removesuffix("<non-verbose/>").strip()
    return error if len(error) <= _MAX_ERROR_CHARS else f"{error[:_MAX_ERROR_CHARS]}…"


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(num_threads=2)
