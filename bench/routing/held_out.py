"""Workloads made up from a seed, to examine how `fresh` is learned (docs/decisions/0018).

Voice and codebase decided two of its constants; the others were looked at only then.

    support   one tenant has more than half of the chats, thirty small ones the rest; in waves
    voice     10 to 40 short turns, seconds apart
    extract   every minute 200 documents that share nothing, behind one of three schemas
    judge     answers to be judged, each by five of 40 rubrics of 1,000 to 5,000 tokens before it
    codebase  questions on 25 texts of 20,000 to 60,000 tokens that many share
    profiles  a prompt for each of 40 firms, behind it one of 2,000 users, behind that a message

Where there are turns, as many sessions begin as four groups can take, so that a replay hardly
changes the time between turns: compressed a hundred times, a session is over before its first
answer.
"""

from collections.abc import Iterator
from itertools import count
from math import pi, sin
from random import Random

from bench.routing.made_up import NUM_REQUESTS, Workload, begun, blocks, popular, row, turns

from quire.simulate.trace import Row


def _support(rng: Random) -> Iterator[Row]:
    small = [blocks(("tenant", i), rng.randint(500, 4_000)) for i in range(30)]
    main, at_ms = blocks("main", 6_000), 0.0
    for number in count():
        wave = 1 + 0.7 * sin(2 * pi * at_ms / 120_000)
        at_ms += rng.expovariate(wave / 20)
        chain = main if rng.random() < 0.6 else rng.choice(small)
        yield from turns(
            rng,
            at_ms,
            number,
            chain,
            num_turns=rng.randint(2, 6),
            asked=(30, 700),
            answered=(80, 300),
            pause_ms=8_000,
            think_ms=15_000,
        )


def _voice(rng: Random) -> Iterator[Row]:
    systems = [blocks(("system", i), rng.randint(800, 1_600)) for i in range(10)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 100)
        yield from turns(
            rng,
            at_ms,
            number,
            systems[popular(rng, len(systems))],
            num_turns=rng.randint(10, 40),
            asked=(40, 260),
            answered=(20, 80),
            pause_ms=2_000,
            think_ms=3_000,
        )


def _extract(rng: Random) -> Iterator[Row]:
    schemas = [blocks(("schema", i), rng.randint(1_000, 3_000)) for i in range(3)]
    for batch in count():
        schema = rng.choice(schemas)
        for number in range(200):
            chain = schema + blocks((batch, number), rng.randint(2_000, 10_000))
            yield row(batch * 60_000 + rng.random() * 20_000, chain, rng.randint(50, 300), rng)


def _judge(rng: Random) -> Iterator[Row]:
    rubrics = [blocks(("rubric", i), rng.randint(1_000, 5_000)) for i in range(40)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 700)
        num_tokens = rng.randint(500, 4_000)
        for rubric in rng.sample(range(len(rubrics)), 5):
            chain = rubrics[rubric] + blocks((number, rubric), num_tokens)
            yield row(at_ms, chain, rng.randint(5, 120), rng)


def _codebase(rng: Random) -> Iterator[Row]:
    texts = [blocks(("text", i), rng.randint(20_000, 60_000)) for i in range(25)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 60)
        yield from turns(
            rng,
            at_ms,
            number,
            texts[popular(rng, len(texts))],
            num_turns=rng.randint(1, 5),
            asked=(50, 1_500),
            answered=(100, 700),
            pause_ms=10_000,
            think_ms=20_000,
        )


def _profiles(rng: Random) -> Iterator[Row]:
    firms = [blocks(("firm", i), rng.randint(1_000, 3_000)) for i in range(40)]
    users = [(popular(rng, len(firms)), rng.randint(200, 2_000)) for _ in range(2_000)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 150)
        user = popular(rng, len(users))
        firm, num_tokens = users[user]
        chain = firms[firm] + blocks(("user", user), num_tokens)
        yield row(at_ms, chain + blocks(number, rng.randint(50, 1_000)), rng.randint(30, 400), rng)


WORKLOADS: dict[str, Workload] = {
    "support": begun(_support, 5 * NUM_REQUESTS),
    "voice": begun(_voice, 5 * NUM_REQUESTS),
    "extract": begun(_extract),
    "judge": begun(_judge),
    "codebase": begun(_codebase),
    "profiles": begun(_profiles),
}
