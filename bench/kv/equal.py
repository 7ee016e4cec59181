"""Checks that tokens and log-probabilities are the same wherever a prompt's KV comes from."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
from bench.kv.groups import (
    Answer,
    Remote,
    Said,
    answers,
    ask,
    config_of,
    gib_of,
    random_prompt,
    running,
)
from bench.report import markdown

from quire.cluster.group.server import GroupServer
from quire.worker.blocks.hashing import TokenIds
from quire.worker.parts.tiers import arriving

PLACES = ("nowhere", "cache", "host", "disk", "disk after a restart", "peer")
DTYPES: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
WAYS = ((2, 1), (1, 2))
"""Number of ranks of the lender and of the borrower, by case."""
_CACHE_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 80, 48, 600
_RUNS = 3
"""Times that a borrower is started, with the same disk."""
_MOST_AT_ONCE = 4
_MIN_SHARE = 0.02
_SETTLE_S = 0.3
_PATIENCE_S = 60.0
"""The demo model computes sooner than a group answers, and here nobody is in a hurry."""


@dataclass
class Prompt:
    token_ids: TokenIds
    run: int
    """The borrower's, in which it was asked last."""


@dataclass
class Found:
    """The results of all requests so far."""

    num_requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By cell and place; a request whose KV came from several places counts for each."""
    wrong: list[str] = field(default_factory=list)


def equal(*, num_requests: int, dtypes: Sequence[str], seed: int = 0) -> int:
    """Prints counts; returns 1 where an answer differs, or a place has too few requests."""
    cells = list(product(dtypes, WAYS))
    found = Found()
    for number, (dtype, way) in enumerate(cells):
        num = num_requests * (number + 1) // len(cells) - num_requests * number // len(cells)
        asyncio.run(_run_cell(dtype, way, num, seed + number, found))
        print(f"{_name(dtype, way)}: {num} requests", flush=True)
    rows = [
        [name, *(str(found.num_requests[name, place]) for place in PLACES)]
        for name in (_name(*cell) for cell in cells)
    ]
    sums = [sum(int(row[1 + column]) for row in rows) for column in range(len(PLACES))]
    print(markdown(["", *PLACES], [*rows, ["all", *map(str, sums)]]))
    few = [
        f"{_name(*cell)}: {found.num_requests[_name(*cell), place]} requests from {place}"
        for cell in cells
        for place in PLACES
        if found.num_requests[_name(*cell), place] < _MIN_SHARE * num_requests / len(cells)
    ]
    for line in (*few, *found.wrong[:20]):
        print(line)
    print(f"{num_requests} requests, {len(found.wrong)} answers that differ")
    return bool(few or found.wrong)


def _name(dtype: str, way: tuple[int, int]) -> str:
    return f"{dtype}, TP {way[0]} → TP {way[1]}"


async def _run_cell(
    dtype: str, way: tuple[int, int], num_requests: int, seed: int, found: Found
) -> None:
    """A borrower with little room is started several times with one disk, beside one lender."""
    num_lender_ranks, num_ranks = way
    plain = config_of(**DTYPES[dtype], enable_prefix_caching=False, num_blocks=200)
    lender = config_of(
        **DTYPES[dtype], kv_transfer=True, tensor_parallel_size=num_lender_ranks, num_blocks=400
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(arriving, "MIN_SLACK_S", _PATIENCE_S),
    ):
        borrower = config_of(
            **DTYPES[dtype],
            kv_transfer=True,
            tensor_parallel_size=num_ranks,
            num_blocks=_CACHE_BLOCKS,
            kv_offloading_size=gib_of(_HOST_BLOCKS, plain),
            kv_disk_dir=Path(folder),
            kv_disk_size=gib_of(_DISK_BLOCKS, plain),
        )
        async with running(plain, "plain") as reference, Remote(lender, "lender") as remote:
            cell = _Cell(_name(dtype, way), reference, remote, np.random.default_rng(seed), found)
            for run in range(_RUNS):
                num = num_requests * (run + 1) // _RUNS - num_requests * run // _RUNS
                async with running(borrower, "borrower") as group:
                    await cell.run(group, run, num)
                    await asyncio.sleep(_SETTLE_S)  # Until all is written.


@dataclass
class _Cell:
    name: str
    reference: GroupServer
    lender: Remote
    rng: np.random.Generator
    found: Found
    known: list[Prompt] = field(default_factory=list)

    async def run(self, group: GroupServer, run: int, num_requests: int) -> None:
        while num_requests:
            num = min(num_requests, int(self.rng.integers(1, _MOST_AT_ONCE + 1)))
            num_requests -= num
            await self._ask([self._draw(run) for _ in range(num)], group, run)

    def _draw(self, run: int) -> tuple[TokenIds, bool, int]:
        """A prompt, whether the lender has it, and in which run its beginning was asked last."""
        rng = self.rng
        is_lent = rng.random() < 0.25
        begin, before = random_prompt(rng, 0), run
        if self.known and rng.random() < 0.75:
            # Some are in the cache, more in host memory and most on disk.
            age = min(int(rng.exponential(20)), len(self.known) - 1)
            prompt = self.known[-1 - age]
            begin = prompt.token_ids[: rng.integers(len(prompt.token_ids) // 2, 400)]
            begin, before, prompt.run = begin[:260], prompt.run, run
        tail = rng.integers(60, 160) if is_lent or not len(begin) else rng.integers(1, 40)
        return np.concatenate([begin, random_prompt(rng, int(tail))]), is_lent, before

    async def _ask(
        self, batch: list[tuple[TokenIds, bool, int]], group: GroupServer, run: int
    ) -> None:
        """All at once, of the borrower and then of the one without a cache."""
        prompts = [token_ids for token_ids, _, _ in batch]
        lent = [token_ids for token_ids, is_lent, _ in batch if is_lent]
        answered = iter(await self.lender.call(answers, lent) if lent else [])
        said = await asyncio.gather(
            *[
                ask(group, token_ids, self.lender.source(token_ids) if is_lent else None)
                for token_ids, is_lent, _ in batch
            ]
        )
        expected = await answers(self.reference, prompts)
        for (token_ids, is_lent, before), each, right in zip(batch, said, expected, strict=True):
            self._note(each, right, is_old=before < run)
            if is_lent:
                self._check("the lender", next(answered), right)
            self.known.append(Prompt(token_ids, run))

    def _note(self, said: Said, right: Answer, *, is_old: bool) -> None:
        places = places_of(said, is_old=is_old)
        for place in places:
            self.found.num_requests[self.name, place] += 1
        self._check(", ".join(places), said.answer, right)

    def _check(self, place: str, answer: Answer, right: Answer) -> None:
        if answer != right:
            self.found.wrong.append(f"{self.name}, {place}: {answer} is not {right}")


def places_of(said: Said, *, is_old: bool = False) -> list[str]:
    """Where a prompt's KV came from. ``is_old``: it has not been asked for since a restart."""
    fetched = said.fetched
    elsewhere = {
        "host": fetched.num_host_tokens,
        "disk after a restart" if is_old else "disk": fetched.num_disk_tokens,
        "peer": fetched.num_peer_tokens,
    }
    num_here = said.num_cached_tokens - sum(elsewhere.values())
    places = ["cache"] * (num_here > 0) + [place for place, num in elsewhere.items() if num]
    return places or ["nowhere"]
