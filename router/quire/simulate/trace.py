"""A request trace as flat columns, in order of arrival."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import NamedTuple

from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError


class Row(NamedTuple):
    """One request."""

    arrival_ms: float
    num_input: int
    num_output: int
    chain: tuple[BlockHash, ...]
    """Names of its full blocks; requests share them where their prompts begin alike."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One request per index of each column."""

    name: str
    block_size: int
    arrival_ms: Sequence[float]
    num_input: Sequence[int]
    num_output: Sequence[int]
    chains: Sequence[tuple[BlockHash, ...]]

    @classmethod
    def of(cls, rows: Sequence[Row], *, name: str, block_size: int) -> "Trace":
        """Rows in any order; the first to arrive does so at 0.

        Raises:
            ConfigError: There are none, or one has no tokens or no time.
        """
        if not rows:
            raise ConfigError(f"{name}: no requests; one per line is needed")
        for row in rows:
            if not isfinite(row.arrival_ms):
                raise ConfigError(
                    f"{name}: a request arrives at {row.arrival_ms} ms; each must have a time"
                )
        rows = sorted(rows, key=lambda row: row.arrival_ms)
        for row in rows:
            if row.num_input < 1 or row.num_output < 1:
                raise ConfigError(
                    f"{name}: {row.num_input} prompt and {row.num_output} output tokens at "
                    f"{row.arrival_ms} ms; both must be at least 1"
                )
        start = rows[0].arrival_ms
        return cls(
            name=name,
            block_size=block_size,
            arrival_ms=[row.arrival_ms - start for row in rows],
            num_input=[row.num_input for row in rows],
            num_output=[row.num_output for row in rows],
            chains=[row.chain[: row.num_input // block_size] for row in rows],
        )

    def __len__(self) -> int:
        return len(self.arrival_ms)

    @property
    def rows(self) -> list[Row]:
        columns = (self.arrival_ms, self.num_input, self.num_output, self.chains)
        return [Row(*row) for row in zip(*columns, strict=True)]

    def first(self, num_requests: int) -> "Trace":
        return Trace.of(self.rows[:num_requests], name=self.name, block_size=self.block_size)

    def at_speed(self, speed: float) -> "Trace":
        """The same requests, arriving ``speed`` times as fast."""
        return replace(self, arrival_ms=[arrival / speed for arrival in self.arrival_ms])

    def spread(self, *, seed: int, within_ms: float) -> "Trace":
        """Each arrival delayed by a random time up to ``within_ms``, for traces with coarse
        clocks."""
        rng = random.Random(seed)
        rows = [
            row._replace(arrival_ms=row.arrival_ms + rng.random() * within_ms) for row in self.rows
        ]
        return Trace.of(rows, name=self.name, block_size=self.block_size)
