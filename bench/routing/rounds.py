"""A short trace made long: what it is like when caches have been warm for some time."""

from collections import Counter
from collections.abc import Iterator, Sequence

from quire.simulate.trace import Row
from quire.simulate.trace_files import block_name
from quire.worker.api.hashing import BlockHash

_FEW = 3
"""Requests that have a block: if not more, then one conversation or one question."""


def in_rounds(rows: Sequence[Row], num_rounds: int) -> list[Row]:
    """``rows``, in order of arrival, repeated ``num_rounds`` times. Rounds share the system prompts
    and texts that several requests have; conversations are new in each round."""
    num_with = Counter(block for row in rows for block in set(row.chain))
    round_ms = rows[-1].arrival_ms - rows[0].arrival_ms
    every_ms = round_ms + round_ms / len(rows)

    def renamed(row: Row, number: int) -> Iterator[BlockHash]:
        for block in row.chain:
            is_own = number > 0 and num_with[block] <= _FEW
            yield block_name((block, "round", number)) if is_own else block

    return [
        row._replace(
            arrival_ms=row.arrival_ms + number * every_ms, chain=tuple(renamed(row, number))
        )
        for number in range(num_rounds)
        for row in rows
    ]
