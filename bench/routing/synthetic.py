"""Workloads made up from a seed. The policy was chosen with some of them in sight: agents, rag and
few_shot decided between its last variants (docs/decisions/0018), tides and bursts were beside them.

    agents     loops of 3 to 25 calls on 12 long tool prompts, each with what the call before gave
    rag        a short instruction and four of 2,000 documents, popular ones more often, any order
    few_shot   jobs of 20 to 150 short questions behind the same 8,000 to 24,000 tokens of examples
    bursts     chats of several turns, five times as many in the first ten seconds of each minute
    tides      300 tenants, a few of them with most of the load, which rises and falls by a factor
               of four within five minutes; short answers
    documents  two to six questions on a document of 8,000 to 24,000 tokens of one's own, among as
               many short prompts that share nothing

The sizes are guesses of what such programs send; what matters is that they differ from each other
and from the recorded traces.
"""

from collections.abc import Iterator
from itertools import count
from math import pi, sin
from random import Random

from bench.routing.made_up import NUM_REQUESTS, Workload, blocks, popular, row

from quire.simulate.trace import Row


def _agents(rng: Random) -> Iterator[Row]:
    tools = [blocks(("tools", i), rng.randint(4_000, 16_000)) for i in range(12)]
    num_rows, start_ms = 0, 0.0
    for session in count():
        start_ms += rng.expovariate(1 / 1_000)
        at_ms, chain = start_ms, tools[popular(rng, len(tools))]
        for step in range(rng.randint(3, 25)):
            chain += blocks((session, step), rng.randint(200, 2_000))
            yield row(at_ms, chain, rng.randint(30, 300), rng)
            num_rows += 1
            at_ms += 1_000 + rng.expovariate(1 / 3_000)
        if num_rows >= NUM_REQUESTS:
            return


def _rag(rng: Random) -> Iterator[Row]:
    instructions = [blocks(("instruction", i), 512) for i in range(8)]
    lengths = [rng.randint(500, 2_000) for _ in range(2_000)]
    at_ms = 0.0
    for _ in range(NUM_REQUESTS):
        at_ms += rng.expovariate(1 / 100)
        instruction = popular(rng, len(instructions))
        chain = instructions[instruction]
        path: tuple[int, ...] = (instruction,)
        for _ in range(4):
            # A document behind another one has other blocks than behind a third.
            document = popular(rng, len(lengths))
            path += (document,)
            chain += blocks(path, lengths[document])
        yield row(at_ms, chain, rng.randint(50, 400), rng)


def _few_shot(rng: Random) -> Iterator[Row]:
    num_rows, start_ms = 0, 0.0
    for job in count():
        start_ms += rng.expovariate(1 / 8_000)
        examples = blocks(("examples", job), rng.randint(8_000, 24_000))
        for _ in range(rng.randint(20, 150)):
            yield row(start_ms + rng.random() * 5_000, examples, rng.randint(2, 30), rng)
            num_rows += 1
        if num_rows >= NUM_REQUESTS:
            return


def _bursts(rng: Random) -> Iterator[Row]:
    systems = [blocks(("system", i), rng.randint(300, 3_000)) for i in range(50)]
    num_rows, start_ms = 0, 0.0
    for chat in count():
        is_burst = start_ms % 60_000 < 10_000
        start_ms += rng.expovariate((5 if is_burst else 1) / 500)
        at_ms, chain = start_ms, systems[popular(rng, len(systems))]
        for turn in range(rng.randint(1, 8)):
            chain += blocks((chat, turn), rng.randint(50, 1_500))
            yield row(at_ms, chain, rng.randint(50, 600), rng)
            num_rows += 1
            at_ms += 5_000 + rng.expovariate(1 / 20_000)
        if num_rows >= NUM_REQUESTS:
            return


def _tides(rng: Random) -> Iterator[Row]:
    tenants = [blocks(("tenant", i), rng.randint(500, 6_000)) for i in range(300)]
    weights = [(i + 1) ** -1.3 for i in range(len(tenants))]
    num_rows, start_ms = 0, 0.0
    while num_rows < NUM_REQUESTS:
        tide = 1 + 0.6 * sin(2 * pi * start_ms / 300_000)
        start_ms += rng.expovariate(tide / 200)
        (chain,) = rng.choices(tenants, weights)
        at_ms = start_ms
        for turn in range(rng.randint(1, 3)):
            chain += blocks((num_rows, turn), rng.randint(30, 2_500))
            yield row(at_ms, chain, rng.randint(10, 200), rng)
            num_rows += 1
            at_ms += 3_000 + rng.expovariate(1 / 10_000)


def _documents(rng: Random) -> Iterator[Row]:
    num_rows, start_ms = 0, 0.0
    while num_rows < NUM_REQUESTS:
        start_ms += rng.expovariate(1 / 1_000)
        at_ms, chain = start_ms, blocks(("document", num_rows), rng.randint(8_000, 24_000))
        for question in range(rng.randint(2, 6)):
            chain += blocks((num_rows, question), rng.randint(20, 800))
            yield row(at_ms, chain, rng.randint(50, 500), rng)
            alone = blocks(("alone", num_rows), rng.randint(100, 2_000))
            yield row(start_ms + rng.random() * 60_000, alone, rng.randint(20, 800), rng)
            num_rows += 2
            at_ms += 10_000 + rng.expovariate(1 / 20_000)


WORKLOADS: dict[str, Workload] = {
    "agents": _agents,
    "rag": _rag,
    "few_shot": _few_shot,
    "bursts": _bursts,
    "tides": _tides,
    "documents": _documents,
}
