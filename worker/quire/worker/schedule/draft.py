"""Guesses a sequence's next tokens, which changes how many tokens a step brings and no token.

A step computes guessed tokens beside a sequence's last one, and draws the token behind each of them
as it always would: from the logits there, the parameters, the seed and the position. The first
token that is drawn otherwise than it was guessed ends what counts.

Guesses are, in this order: the tokens that the form of the output leaves no choice about; those
that followed where the last tokens stood before, in the sequence itself; those that followed them
in an output of another request; those that followed in the sequence where another token stood
instead of the last one, as in a copy with a change.

A few rows more cost a step nearly nothing, as long as it mainly reads the weights. A draft
whose first token is wrong makes a pause, of as many steps as there were such drafts in a row.
"""

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from quire.worker.api.hashing import BlockHash, TokenIds

MAX_STEP_ROWS = 9
"""Rows of a step up to which more of them cost little: a single sequence has 8 tokens guessed."""
_FIRST_DRAFT = 4
_MIN_MATCH = 2
"""Last tokens that must have stood together before in the sequence."""
_MIN_MATCH_BEFORE_CHANGE = 4
"""The same before a last token that stands instead of another one."""
_MAX_MATCH = 16
_MAX_PAUSE = 64
RECENT_MATCH = 4
"""The same in outputs of others."""
_MAX_RECENT = 2**16
"""Tokens of a generation of recent outputs: about 10 MiB."""


class Drafter:
    """The guesses for one sequence: how many, and when."""

    __slots__ = ("_num_misses", "_pause", "_size")

    def __init__(self) -> None:
        self._size = _FIRST_DRAFT
        self._num_misses = 0
        self._pause = 0

    def draft(
        self,
        token_ids: TokenIds,
        *,
        max_tokens: int,
        forced: Items[int] = (),
        recent: "RecentOutputs | None" = None,
        root: BlockHash | None = None,
    ) -> list[int]:
        """At most ``max_tokens`` that may follow ``token_ids``; often none. ``forced`` follow in
        any case, if the model cuts them into tokens as the tokenizer does. Blocks that begin at
        ``root`` are shared with the requests whose ``recent`` outputs may be looked at.
        """
        found = list(forced[:max_tokens])
        if self._pause and not found:
            self._pause -= 1
            return []
        if found:
            token_ids = np.concatenate([token_ids, np.array(found, token_ids.dtype)])
        num_left = min(max_tokens - len(found), self._size)
        if num_left <= 0:
            return found
        more = guess(token_ids, max_tokens=num_left)
        if not more and recent is not None and root is not None:
            more = recent.guess(root, token_ids, max_tokens=num_left)
        return found + (more or guess_after_change(token_ids, max_tokens=num_left))

    def learn(self, *, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft."""
        if num_accepted == num_drafted:
            self._size = min(2 * self._size, MAX_STEP_ROWS)
        if num_accepted:
            self._num_misses = 0
        else:
            self._size = _FIRST_DRAFT
            self._num_misses += 1
            self._pause = min(self._num_misses, _MAX_PAUSE)


def guess(token_ids: TokenIds, *, max_tokens: int) -> list[int]:
    """The tokens that followed the last time that the longest run of last tokens stood before.
    Where fewer than ``max_tokens`` have followed since, they repeat.
    """
    return _repeated(token_ids, _behind_match(token_ids, least=_MIN_MATCH), max_tokens)


def guess_after_change(token_ids: TokenIds, *, max_tokens: int) -> list[int]:
    """Like `guess`, but by the run of tokens that ends before the last one, going on behind the
    token that followed the run then."""
    start = _behind_match(token_ids[:-1], least=_MIN_MATCH_BEFORE_CHANGE)
    return _repeated(token_ids, None if start is None else start + 1, max_tokens)


def _behind_match(token_ids: TokenIds, *, least: int) -> int | None:
    """The index behind the last place where the longest run of last tokens stood before; ``None``
    where that has fewer than ``least``."""
    num = len(token_ids)
    if num <= least:
        return None
    ends: npt.NDArray[np.intp] = np.flatnonzero(token_ids[:-1] == token_ids[-1])
    for length in range(1, min(_MAX_MATCH, num - 1)):
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[num - 1 - length]]
        if not len(longer):
            if length < least:
                return None
            break
        ends = longer
    return int(ends[-1]) + 1


def _repeated(token_ids: TokenIds, start: int | None, max_tokens: int) -> list[int]:
    """The tokens from ``start`` on, again from there behind the last one."""
    if start is None:
        return []
    found: list[int] = token_ids[start : start + max_tokens].tolist()
    return [found[index % len(found)] for index in range(max_tokens)]


class RecentOutputs:
    """Outputs of requests that have ended, and where each run of four tokens stood last.

    A request sees those of requests with the same root of block hashes alone: of the same tenant
    and salt. There are two generations: once the younger one is full, the older one is forgotten.
    """

    def __init__(self, *, max_tokens: int = _MAX_RECENT) -> None:
        self._max_tokens = max_tokens
        self._young, self._old = _Generation(), _Generation()

    def add(self, root: BlockHash, token_ids: TokenIds) -> None:
        """An output, and the tokens right before it if there are any."""
        if len(token_ids) <= RECENT_MATCH:
            return
        if self._young.num_tokens + len(token_ids) > self._max_tokens:
            self._young, self._old = _Generation(), self._young
        self._young.add(root, token_ids[-self._max_tokens :].tolist())

    def guess(self, root: BlockHash, token_ids: TokenIds, *, max_tokens: int) -> list[int]:
        """What followed the last four of ``token_ids`` there; often nothing."""
        last = tuple(token_ids[-RECENT_MATCH:].tolist())
        if len(last) < RECENT_MATCH or max_tokens <= 0:
            return []
        return self._young.after(root, last, max_tokens) or self._old.after(root, last, max_tokens)


class _Generation:
    def __init__(self) -> None:
        self.num_tokens = 0
        self._outputs: list[list[int]] = []
        self._places: dict[tuple[BlockHash, tuple[int, ...]], tuple[int, int]] = {}
        """The output and the index in it behind each run of tokens."""

    def add(self, root: BlockHash, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)
        number = len(self._outputs)
        self._outputs.append(token_ids)
        runs = zip(*(token_ids[first:] for first in range(RECENT_MATCH)), strict=False)
        for end, run in enumerate(runs, RECENT_MATCH):
            if end < len(token_ids):
                self._places[root, run] = number, end

    def after(self, root: BlockHash, run: tuple[int, ...], max_tokens: int) -> list[int]:
        number, begin = self._places.get((root, run), (0, 0))
        return self._outputs[number][begin : begin + max_tokens] if begin else []
