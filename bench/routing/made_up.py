"""Parts of made-up workloads."""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import TypeAlias

from quire.simulate.trace import Row, Trace
from quire.simulate.trace_files import block_name
from quire.worker.api.hashing import BlockHash

BLOCK_SIZE = 128
NUM_REQUESTS = 8_000

Chain: TypeAlias = tuple[BlockHash, ...]
Workload: TypeAlias = Callable[[Random], Iterator[Row]]
"""`NUM_REQUESTS` in any order, or a few more."""


def begun(endless: Workload, num_requests: int = NUM_REQUESTS) -> Workload:
    """The first requests of a workload without end."""
    return lambda rng: islice(endless(rng), num_requests)


def made_up_trace(name: str, workload: Workload, *, seed: int) -> Trace:
    """A seed gives one trace."""
    rows = list(workload(Random(f"{name}/{seed}")))
    return Trace.of(rows, name=name, block_size=BLOCK_SIZE)


def popular(rng: Random, size: int) -> int:
    """The i-th of ``size`` with a probability that falls as 1/i."""
    return int(size ** rng.random()) - 1


def blocks(name: object, num_tokens: int) -> Chain:
    """That many tokens' full blocks, which are those of nothing with another name."""
    return tuple(block_name((name, i)) for i in range(num_tokens // BLOCK_SIZE))


def row(at_ms: float, chain: Chain, num_output: int, rng: Random) -> Row:
    """A prompt of ``chain`` and a few tokens of its own."""
    return Row(at_ms, len(chain) * BLOCK_SIZE + rng.randint(1, BLOCK_SIZE - 1), num_output, chain)


def turns(
    rng: Random,
    at_ms: float,
    name: object,
    chain: Chain,
    *,
    num_turns: int,
    asked: tuple[int, int],
    answered: tuple[int, int],
    pause_ms: float,
    think_ms: float,
) -> Iterator[Row]:
    """A conversation behind ``chain``: tokens between two bounds are asked and answered in each
    turn, and the next comes after a pause and some thinking."""
    for turn in range(num_turns):
        chain += blocks((name, turn), rng.randint(*asked))
        yield row(at_ms, chain, rng.randint(*answered), rng)
        at_ms += pause_ms + rng.expovariate(1 / think_ms)
