"""More workloads made up from a seed, on which `behind` was chosen (docs/decisions/0018).

    rollouts   a question asked 4 to 16 times at once, behind one of three instructions
    branches   searches in a tree: each node goes on in two or three of the answers before it
    editor     completions in a file of 1,000 to 12,000 tokens that changes somewhere before the
               end from one keystroke to the next; few tokens, 40 files in a repository
    one        the same 3,000 tokens before everything, and texts that share nothing behind them
    shifting   40 of 800 tenants have nearly all of the load, other ones every three minutes
    contrast   chats beside prompts of 30,000 to 100,000 tokens that nobody else has
    reasoning  short questions of two or three turns, answers of 1,000 to 6,000 tokens
    mixture    chats, answers from a store of documents, agents and jobs in turn, on one cluster
    tiny       48,000 prompts of up to 260 tokens behind one of 200 system prompts
    huge       a few questions each on texts of 20,000 to 60,000 tokens that nobody else has

As with `bench.routing.synthetic` the sizes are guesses.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

from bench.routing.made_up import NUM_REQUESTS, Chain, Workload, begun, blocks, popular, row, turns

from quire.simulate.trace import Row


def _rollouts(rng: Random) -> Iterator[Row]:
    instructions = [blocks(("instruction", i), rng.randint(500, 4_000)) for i in range(3)]
    at_ms = 0.0
    for question in count():
        at_ms += rng.expovariate(1 / 800)
        chain = rng.choice(instructions) + blocks(question, rng.randint(100, 3_000))
        for _ in range(rng.choice((4, 8, 16))):
            yield row(at_ms, chain, rng.randint(200, 2_000), rng)


def _branches(rng: Random) -> Iterator[Row]:
    """A level of a search is asked when the one before it has been answered."""
    start_ms = 0.0
    for search in count():
        start_ms += rng.expovariate(1 / 5_000)
        at_ms, level = start_ms, [blocks(search, rng.randint(1_000, 8_000))]
        for depth in range(rng.randint(2, 6)):
            for chain in level:
                yield row(at_ms, chain, rng.randint(100, 500), rng)
            kept = rng.sample(level, min(len(level), 3))
            level = [
                chain + blocks((search, depth, parent, child), rng.randint(150, 600))
                for parent, chain in enumerate(kept)
                for child in range(rng.randint(2, 3))
            ]
            at_ms += 4_000 + rng.expovariate(1 / 2_000)


def _editor(rng: Random) -> Iterator[Row]:
    repositories = [blocks(("repository", i), rng.randint(500, 3_000)) for i in range(40)]
    start_ms = 0.0
    for session in count():
        start_ms += rng.expovariate(1 / 3_000)
        at_ms = start_ms
        shared = repositories[popular(rng, len(repositories))]
        file = blocks(("file", session), rng.randint(1_000, 12_000))
        for keystroke in range(rng.randint(5, 60)):
            # What stands behind a change has other blocks from then on.
            begin = rng.randint(len(file) // 2, len(file))
            file = file[:begin] + blocks((session, keystroke), 128 * (len(file) - begin))
            yield row(at_ms, shared + file, rng.randint(5, 60), rng)
            at_ms += 300 + rng.expovariate(1 / 1_500)


def _one(rng: Random) -> Iterator[Row]:
    beginning = blocks("one", 3_000)
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 100)
        chain = beginning + blocks(number, rng.randint(0, 4_000))
        yield row(at_ms, chain, rng.randint(5, 400), rng)


def _shifting(rng: Random) -> Iterator[Row]:
    tenants = [blocks(("tenant", i), rng.randint(1_000, 8_000)) for i in range(800)]
    at_ms, shift_ms = 0.0, 180_000.0
    for number in count():
        at_ms += rng.expovariate(1 / 150)
        now = int(at_ms // shift_ms) * 40
        tenant = (now + popular(rng, 40)) if rng.random() < 0.95 else rng.randrange(len(tenants))
        chain = tenants[tenant % len(tenants)] + blocks(number, rng.randint(20, 1_000))
        yield row(at_ms, chain, rng.randint(20, 300), rng)


def _contrast(rng: Random) -> Iterator[Row]:
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 2_500)
        if rng.random() < 0.2:
            chain = blocks(("long", number), rng.randint(30_000, 100_000))
            yield row(at_ms, chain, rng.randint(100, 800), rng)
            continue
        yield from _chat(rng, at_ms, ("short", number), blocks(("system", number % 20), 800))


def _reasoning(rng: Random) -> Iterator[Row]:
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 1_000)
        yield from turns(
            rng,
            at_ms,
            number,
            blocks("system", 600),
            num_turns=rng.randint(1, 3),
            asked=(30, 800),
            answered=(1_000, 6_000),
            pause_ms=40_000,
            think_ms=30_000,
        )


def _mixture(rng: Random) -> Iterator[Row]:
    systems = [blocks(("system", i), rng.randint(300, 3_000)) for i in range(30)]
    documents = [rng.randint(500, 2_000) for _ in range(500)]
    tools = [blocks(("tools", i), rng.randint(3_000, 12_000)) for i in range(6)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 900)
        kind = rng.choices(("chat", "store", "agent", "job"), (40, 45, 10, 5))[0]
        if kind == "chat":
            yield from _chat(rng, at_ms, number, systems[popular(rng, len(systems))])
        elif kind == "store":
            path = [popular(rng, len(documents)) for _ in range(3)]
            chain = blocks("store", 600)
            for i, document in enumerate(path):
                chain += blocks(("store", *path[: i + 1]), documents[document])
            yield row(at_ms, chain, rng.randint(50, 400), rng)
        elif kind == "agent":
            yield from _chat(rng, at_ms, number, tools[popular(rng, len(tools))], think_ms=3_000)
        else:
            examples = blocks(("job", number), rng.randint(4_000, 16_000))
            for _ in range(rng.randint(10, 60)):
                yield row(at_ms + rng.random() * 8_000, examples, rng.randint(2, 60), rng)


def _chat(
    rng: Random, at_ms: float, name: object, chain: Chain, *, think_ms: float = 25_000
) -> Iterator[Row]:
    return turns(
        rng,
        at_ms,
        name,
        chain,
        num_turns=rng.randint(1, 10),
        asked=(50, 1_500),
        answered=(30, 600),
        pause_ms=think_ms / 5,
        think_ms=think_ms,
    )


def _tiny(rng: Random) -> Iterator[Row]:
    systems = [blocks(("system", i), rng.randint(500, 3_000)) for i in range(200)]
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 20)
        chain = systems[popular(rng, len(systems))] + blocks(number, rng.randint(0, 260))
        yield row(at_ms, chain, rng.randint(5, 50), rng)


def _huge(rng: Random) -> Iterator[Row]:
    at_ms = 0.0
    for number in count():
        at_ms += rng.expovariate(1 / 6_000)
        chain, turn_ms = blocks(number, rng.randint(20_000, 60_000)), at_ms
        for turn in range(rng.randint(1, 6)):
            yield row(turn_ms, chain, rng.randint(100, 800), rng)
            chain += blocks((number, turn), rng.randint(500, 4_000))
            turn_ms += 8_000 + rng.expovariate(1 / 20_000)


WORKLOADS: dict[str, Workload] = {
    "rollouts": begun(_rollouts),
    "branches": begun(_branches),
    "editor": begun(_editor),
    "one": begun(_one),
    "shifting": begun(_shifting),
    "contrast": begun(_contrast),
    "reasoning": begun(_reasoning),
    "mixture": begun(_mixture),
    "tiny": begun(_tiny, 6 * NUM_REQUESTS),
    "huge": begun(_huge),
}
