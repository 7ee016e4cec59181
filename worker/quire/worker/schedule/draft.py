"""Guesses a sequence's next tokens from where its last ones stood before, in prompt or output.

A step computes guessed tokens beside a sequence's last one, and draws the token behind each of them
as it always would: from the logits there, the seed and the position. The first token that is drawn
otherwise than it was guessed ends what counts. So guesses change how many tokens a step brings and
no token.

A few rows more cost a step nearly nothing, as long as it mainly reads the weights. Sequences whose
guesses fail make pauses, which double.
"""

import numpy as np
import numpy.typing as npt

from quire.worker.api.hashing import TokenIds

MAX_STEP_ROWS = 9
"""Rows of a step up to which more of them cost little: a single sequence has 8 tokens guessed."""
_FIRST_DRAFT = 4
_MIN_MATCH = 3
"""Last tokens that must have stood together before."""
_MAX_MATCH = 16
_MAX_PAUSE = 64


class Drafter:
    """The guesses for one sequence: how many, and when."""

    __slots__ = ("_num_misses", "_pause", "_size")

    def __init__(self) -> None:
        self._size = _FIRST_DRAFT
        self._num_misses = 0
        self._pause = 0

    def draft(self, token_ids: TokenIds, *, max_tokens: int) -> list[int]:
        """At most ``max_tokens`` that may follow ``token_ids``; often none."""
        if self._pause:
            self._pause -= 1
            return []
        return guess(token_ids, max_tokens=min(max_tokens, self._size))

    def learn(self, *, num_drafted: int, num_accepted: int) -> None:
        """What became of a draft."""
        if num_accepted == num_drafted:
            self._size = min(2 * self._size, MAX_STEP_ROWS)
        else:
            self._size = num_accepted + 1
        if num_accepted:
            self._num_misses = 0
        else:
            self._num_misses += 1
            self._pause = min(2**self._num_misses, _MAX_PAUSE)


def guess(token_ids: TokenIds, *, max_tokens: int) -> list[int]:
    """The tokens that followed the last time that the longest run of last tokens stood before.
    Where fewer than ``max_tokens`` have followed since, they repeat.
    """
    num = len(token_ids)
    if num <= _MIN_MATCH or max_tokens <= 0:
        return []
    ends: npt.NDArray[np.intp] = np.flatnonzero(token_ids[:-1] == token_ids[-1])
    for length in range(1, min(_MAX_MATCH, num - 1)):
        longer = ends[ends >= length]
        longer = longer[token_ids[longer - length] == token_ids[num - 1 - length]]
        if not len(longer):
            if length < _MIN_MATCH:
                return []
            break
        ends = longer
    start = int(ends[-1]) + 1
    found: list[int] = token_ids[start : start + max_tokens].tolist()
    return [found[index % len(found)] for index in range(max_tokens)]
