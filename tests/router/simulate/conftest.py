import random
from collections.abc import Callable

import pytest

from quire.simulate.trace import Row, Trace
from quire.simulate.trace_files import block_name

MakeTrace = Callable[..., Trace]


@pytest.fixture
def chats() -> MakeTrace:
    """Conversations that grow turn by turn under a few system prompts, from a seed."""

    def make(*, num_requests: int = 400, seed: int = 0, gap_ms: float = 20.0) -> Trace:
        rng = random.Random(seed)
        open_chats = [[("system", i, j) for j in range(4)] for i in range(5)]
        rows, now_ms = [], 0.0
        for number in range(num_requests):
            now_ms += rng.expovariate(1 / gap_ms)
            chat = rng.choice(open_chats) + [("turn", number, j) for j in range(rng.randint(1, 6))]
            open_chats.append(chat)
            del open_chats[5 : max(5, len(open_chats) - 40)]
            chain = tuple(block_name(name) for name in chat)
            rows.append(
                Row(now_ms, 16 * len(chain) + rng.randint(1, 15), rng.randint(1, 40), chain)
            )
        return Trace.of(rows, name="chats", block_size=16)

    return make
