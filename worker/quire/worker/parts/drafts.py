"""Speculation: proposes draft tokens for a sequence. It changes the number of tokens that a step
yields, but no token.

A step computes draft tokens together with a sequence's last token, and samples the token after each
of them as without speculation: from the logits, the parameters, the seed and the position. Tokens
are accepted up to and including the first sample that differs from the draft.

A draft begins with the tokens that the constraint of the output determines. It continues with
tokens from the first of these sources that has some:
1. tokens that followed an earlier occurrence of the last tokens in the same sequence;
2. tokens that followed them in an output of another request;
3. tokens that followed an earlier occurrence in the sequence that differs in the last token, as in
   a copy with a change.

A few more rows cost a step almost nothing while it mainly reads the weights. After a draft whose
first token is rejected, drafting pauses for as many steps as there were such drafts in a row.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.worker.blocks.hashing import BlockHash, TokenIds
from quire.worker.engine.part import Part
from quire.worker.engine.sequence import Sequence
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import Executor

MAX_STEP_ROWS = 9
"""Rows of a step up to which more rows cost little: a single sequence gets 8 draft tokens."""
_FIRST_DRAFT = 4
_MIN_MATCH = 2
"""Least number of last tokens that must occur earlier in the sequence."""
_MIN_MATCH_BEFORE_CHANGE = 4
"""Least number of matching tokens before a last token that differs."""
_MAX_MATCH = 16
_MAX_PAUSE = 64
RECENT_MATCH = 4
"""Number of last tokens that must occur in an output of another request."""
_MAX_RECENT = 2**16
"""Tokens in one generation of recent outputs: about 10 MiB."""


def speculates(config: EngineConfig, executor: Executor) -> bool:
    """Whether the engine uses speculation. With asynchronous scheduling it does not: a step is
    submitted before the tokens that a draft would follow are known."""
    if config.speculation is None:
        return executor.num_ahead == 0 and executor.numerics.startswith("cpu")
    return config.speculation and executor.num_ahead == 0


class Drafts(Part):
    """The drafts of all sequences: `quire.worker.engine.part.Drafting`."""

    def __init__(self, *, max_num_batched_tokens: int) -> None:
        self._max_rows = min(MAX_STEP_ROWS, max_num_batched_tokens)
        self._drafters: dict[Sequence, Drafter] = {}
        self._recent = RecentOutputs()
        self._num_drafted = self._num_accepted = 0

    def num_each(self, num_ready: int) -> int:
        return max(0, self._max_rows - num_ready) // num_ready

    def draft(self, seq: Sequence, max_tokens: int) -> list[int]:
        max_tokens = min(max_tokens, seq.num_undrafted)
        if max_tokens <= 0 or (forced := seq.choices.forced) is None:
            return []
        if seq not in self._drafters:
            self._drafters[seq] = Drafter()
        found = self._drafters[seq].draft(
            seq.token_ids,
            max_tokens=max_tokens,
            forced=forced,
            recent=self._recent,
            root=seq.root,
        )
        ends = [place for place, token_id in enumerate(found) if token_id in seq.end_ids]
        return found[: ends[0]] if ends else found

    def learn(self, seq: Sequence, *, num_drafted: int, num_accepted: int) -> None:
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        self._drafters[seq].learn(num_drafted=num_drafted, num_accepted=num_accepted)

    def forget(self, seq: Sequence) -> None:
        self._drafters.pop(seq, None)
        if seq.root is not None and not seq.is_embedded:
            begin = max(0, seq.num_prompt_tokens - RECENT_MATCH)
            self._recent.add(seq.root, seq.token_ids[begin:])

    def reset(self) -> None:
        self._recent = RecentOutputs()

    def stats(self) -> Mapping[str, Any]:
        return {
            "num_drafted_tokens": self._num_drafted,
            "num_accepted_tokens": self._num_accepted,
        }


class Drafter:
    """Proposes draft tokens for one sequence, and adapts how many and how often."""

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
        """Returns at most ``max_tokens`` draft tokens to follow ``token_ids``, often none.
        ``forced`` are tokens of the only text that the constraint allows; the model may split it
        into other tokens. Only ``recent`` outputs with the same ``root`` of block hashes are used.
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
        """Adapts the size of drafts and the pauses to the outcome of a draft."""
        if num_accepted == num_drafted:
            self._size = min(2 * self._size, MAX_STEP_ROWS)
        if num_accepted:
            self._num_misses = 0
        else:
            self._size = _FIRST_DRAFT
            self._num_misses += 1
            self._pause = min(self._num_misses, _MAX_PAUSE)


def guess(token_ids: TokenIds, *, max_tokens: int) -> list[int]:
    """The tokens that followed the latest earlier occurrence of the longest matching suffix of
    ``token_ids``. If fewer than ``max_tokens`` have followed it, they are repeated.
    """
    return _repeated(token_ids, _behind_match(token_ids, least=_MIN_MATCH), max_tokens)


def guess_after_change(token_ids: TokenIds, *, max_tokens: int) -> list[int]:
    """Like `guess`, but matches the tokens before the last one, and continues after the token that
    followed the match."""
    start = _behind_match(token_ids[:-1], least=_MIN_MATCH_BEFORE_CHANGE)
    return _repeated(token_ids, None if start is None else start + 1, max_tokens)


def _behind_match(token_ids: TokenIds, *, least: int) -> int | None:
    """The index after the latest earlier occurrence of the longest matching suffix; ``None`` if
    that is shorter than ``least``."""
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
    """``max_tokens`` tokens from ``start`` on, continuing at ``start`` after the last one."""
    if start is None:
        return []
    found: list[int] = token_ids[start : start + max_tokens].tolist()
    return [found[index % len(found)] for index in range(max_tokens)]


class RecentOutputs:
    """Outputs of finished requests, with an index of the last place of each run of four tokens.

    A request only sees outputs of requests with the same root of block hashes, that is, of the same
    tenant and salt. There are two generations: when the younger is full, the older is dropped.
    """

    def __init__(self, *, max_tokens: int = _MAX_RECENT) -> None:
        self._max_tokens = max_tokens
        self._young, self._old = _Generation(), _Generation()

    def add(self, root: BlockHash, token_ids: TokenIds) -> None:
        """Adds an output, preceded by the last tokens before it."""
        if len(token_ids) <= RECENT_MATCH:
            return
        if self._young.num_tokens + len(token_ids) > self._max_tokens:
            self._young, self._old = _Generation(), self._young
        self._young.add(root, token_ids[-self._max_tokens :].tolist())

    def guess(self, root: BlockHash, token_ids: TokenIds, *, max_tokens: int) -> list[int]:
        """The tokens that followed the last four of ``token_ids`` in a recent output, if any."""
        last = tuple(token_ids[-RECENT_MATCH:].tolist())
        if len(last) < RECENT_MATCH or max_tokens <= 0:
            return []
        return self._young.after(root, last, max_tokens) or self._old.after(root, last, max_tokens)


class _Generation:
    def __init__(self) -> None:
        self.num_tokens = 0
        self._outputs: list[list[int]] = []
        self._places: dict[tuple[BlockHash, tuple[int, ...]], tuple[int, int]] = {}
        """By root and run of tokens: the number of an output and the index after the run in it."""

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
