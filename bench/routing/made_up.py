"""Generates synthetic workloads from a seed, different from each other and from recorded traces.

    agents    loops of 3 to 25 calls on 12 long tool prompts, each with what the call before gave
    rag       a short instruction and four of 2,000 documents, popular ones more often, any order
    few_shot  jobs of 20 to 150 short questions behind the same 8,000 to 24,000 tokens of examples
    tides     300 tenants, a few of them with most of the load, which rises and falls by a factor
              of four within five minutes; short answers
    one       the same 3,000 tokens before everything, and texts that share nothing behind them
    contrast  chats beside prompts of 30,000 to 100,000 tokens that nobody else has
    voice     10 to 40 short turns, seconds apart; for 4 groups
    codebase  questions on 25 texts of 20,000 to 60,000 tokens that many share; for 4 groups

The sizes are guesses of what such programs send. In those for 4 groups as many sessions begin as
four groups can take, so that a replay hardly changes the time between turns: compressed a hundred
times, a session is over before its first answer.
"""

from collections.abc import Callable, Iterator
from itertools import count, islice
from math import pi, sin
from random import Random
from typing import TypeAlias

from quire.simulate.trace import Row, Trace
from quire.simulate.trace_files import block_name
from quire.worker.blocks.hashing import BlockHash

BLOCK_SIZE = 128
NUM_REQUESTS = 8_000

Chain: TypeAlias = tuple[BlockHash, ...]
Workload: TypeAlias = Callable[[Random], Iterator[Row]]
"""`NUM_REQUESTS` in any order, or a few more."""


def made_up_trace(name: str, *, seed: int) -> Trace:
    """Draws a synthetic trace; equal seeds give equal traces."""
    rows = list(WORKLOADS[name](Random(f"{name}/{seed}")))
    return Trace.of(rows, name=name, block_size=BLOCK_SIZE)


def _agents(rng: Random) -> Iterator[Row]:
    tools = [_blocks(("tools", i), rng.randint(4_000, 16_000)) for i in range(12)]
    num_rows, start_ms = 0, 0.0
    for session in count():
        start_ms += rng.expovariate(1 / 1_000)
        at_ms, chain = start_ms, tools[_popular(rng, len(tools))]
        for step in range(rng.randint(3, 25)):
            chain += _blocks((session, step), rng.randint(200, 2_000))
            yield _row(at_ms, chain, rng.randint(30, 300), rng)
            num_rows += 1
            at_ms += 1_000 + rng.expovariate(1 / 3_000)
        if num_rows >= NUM_REQUESTS:
            return


def _rag(rng: Random) -> Iterator[Row]:
    instructions = [_blocks(("instruction", i), 512) for i in range(8)]
    lengths = [rng.randint(500, 2_000) for _ in range(2_000)]
    at_ms = 0.0
    for _ in range(NUM_REQUESTS):
        at_ms += rng.expovariate(1 / 100)
        instruction = _popular(rng, len(instructions))
        chain = instructions[instruction]
        path: tuple[int, ...] = (instruction,)
        for _ in range(4):
            # A document behind another one has other blocks than behind a third.
            document = _popular(rng, len(lengths))
            path += (document,)
            chain += _blocks(path, lengths[document])
        yield _row(at_ms, chain, rng.randint(50, 400), rng)


def _few_shot(rng: Random) -> Iterator[Row]:
    num_rows, start_ms = 0, 0.0
    for job in count():
        start_ms += rng.expovariate(1 / 8_000)
        examples = _blocks(("examples", job), rng.randint(8_000, 24_000))
        for _ in range(rng.randint(20, 150)):
            yield _row(start_ms + rng.random() * 5_000, examples, rng.randint(2, 30), rng)
            num_rows += 1
        if num_rows >= NUM_REQUESTS:
            return


def _tides(rng: Random) -> Iterator[Row]:
    tenants = [_blocks(("tenant", i), rng.randint(500, 6_000)) for i in range(300)]
    weights = [(i + 1) ** -1.3 for i in range(len(tenants))]
    num_rows, start_ms = 0, 0.0
    while num_rows < NUM_REQUESTS:
        tide = 1 + 0.6 * sin(2 * pi * start_ms / 300_000)
        start_ms += rng.expovariate(tide / 200)
        (chain,) = rng.choices(tenants, weights)
        at_ms = start_ms
        for turn in range(rng.randint(1, 3)):
            chain += _blocks((num_rows, turn), rng.randint(30, 2_500))
            yield _row(at_ms, chain, rng.randint(10, 200), rng)
            num_rows += 1
            at_ms += 3_000 + rng.expovariate(1 / 10_000)


def _one(rng: Random) -> Iterator[Row]:
    beginning = _blocks("one", 3_000)
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 100)
        chain = beginning + _blocks(number, rng.randint(0, 4_000))
        yield _row(at_ms, chain, rng.randint(5, 400), rng)


def _contrast(rng: Random) -> Iterator[Row]:
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 2_500)
        if rng.random() < 0.2:
            chain = _blocks(("long", number), rng.randint(30_000, 100_000))
            yield _row(at_ms, chain, rng.randint(100, 800), rng)
            continue
        yield from _turns(
            rng,
            at_ms,
            ("short", number),
            _blocks(("system", number % 20), 800),
            num_turns=rng.randint(1, 10),
            asked=(50, 1_500),
            answered=(30, 600),
            pause_ms=5_000,
            think_ms=25_000,
        )


def _voice(rng: Random) -> Iterator[Row]:
    systems = [_blocks(("system", i), rng.randint(800, 1_600)) for i in range(10)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 100)
        yield from _turns(
            rng,
            at_ms,
            number,
            systems[_popular(rng, len(systems))],
            num_turns=rng.randint(10, 40),
            asked=(40, 260),
            answered=(20, 80),
            pause_ms=2_000,
            think_ms=3_000,
        )


def _codebase(rng: Random) -> Iterator[Row]:
    texts = [_blocks(("text", i), rng.randint(20_000, 60_000)) for i in range(25)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 60)
        yield from _turns(
            rng,
            at_ms,
            number,
            texts[_popular(rng, len(texts))],
            num_turns=rng.randint(1, 5),
            asked=(50, 1_500),
            answered=(100, 700),
            pause_ms=10_000,
            think_ms=20_000,
        )


def _popular(rng: Random, size: int) -> int:
    """The i-th of ``size`` with a probability that falls as 1/i."""
    return int(size ** rng.random()) - 1


def _blocks(name: object, num_tokens: int) -> Chain:
    """That many tokens' full blocks, which are those of nothing with another name."""
    return tuple(block_name((name, i)) for i in range(num_tokens // BLOCK_SIZE))


def _row(at_ms: float, chain: Chain, num_output: int, rng: Random) -> Row:
    """A prompt of ``chain`` and a few tokens of its own."""
    return Row(at_ms, len(chain) * BLOCK_SIZE + rng.randint(1, BLOCK_SIZE - 1), num_output, chain)


def _turns(
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
        chain += _blocks((name, turn), rng.randint(*asked))
        yield _row(at_ms, chain, rng.randint(*answered), rng)
        at_ms += pause_ms + rng.expovariate(1 / think_ms)


def _begun(endless: Workload, num_requests: int = NUM_REQUESTS) -> Workload:
    """The first requests of an endless workload."""
    return lambda rng: islice(endless(rng), num_requests)


WORKLOADS: dict[str, Workload] = {
    "agents": _agents,
    "rag": _rag,
    "few_shot": _few_shot,
    "tides": _tides,
    "one": _begun(_one),
    "contrast": _begun(_contrast),
    "voice": _begun(_voice, 5 * NUM_REQUESTS),
    "codebase": _begun(_codebase),
}
