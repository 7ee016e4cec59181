"""The cluster's load: chats of many tenants.

All of it is token ids and follows from a seed, so that every policy is asked the same. A chat can
be held in a closed loop, where each prompt contains the real answers before it, or be laid out in
time with answers made up, so that arrivals do not depend on how quickly the cluster answers.
"""

import random
from collections.abc import Sequence
from itertools import accumulate

from bench.peers.checkpoints import VOCAB_SIZE
from bench.peers.workloads import FIRST_TOKEN_ID
from bench.serving.load import Chat, Request, Turn

# From, to; all are drawn evenly.
SYSTEM_TOKENS = (500, 1500)
TURNS = (1, 4)
OWN_TOKENS = (20, 80)
ANSWER_TOKENS = (8, 24)


def tenant_chats(*, num_tenants: int, num_chats: int, think_s: float, seed: int) -> list[Chat]:
    """Chats of tenants, each with a system prompt; the i-th tenant has a share of them as 1 / i.

    ``think_s`` is the mean time before a turn.
    """
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(rng.randint(*bounds)))

    systems = [tokens(SYSTEM_TOKENS) for _ in range(num_tenants)]
    weights = [1 / (i + 1) for i in range(num_tenants)]
    chats = []
    for number in range(num_chats):
        (tenant,) = rng.choices(range(num_tenants), weights)
        turns = [
            Turn(
                token_ids=(systems[tenant] if not i else ()) + tokens(OWN_TOKENS),
                max_tokens=rng.randint(*ANSWER_TOKENS),
                think_s=rng.expovariate(1 / think_s) if think_s else 0.0,
            )
            for i in range(rng.randint(*TURNS))
        ]
        chats.append(Chat(name=f"chat-{number}", turns=turns, cache_salt=f"tenant-{tenant}"))
    return chats


def laid_out(
    chats: Sequence[Chat], *, chats_per_s: float, seed: int, vocab_size: int, answer_s: float = 0.5
) -> list[Request]:
    """The chats begin as a Poisson process; answers are made up and take ``answer_s`` each."""
    rng = random.Random(seed)
    begins = accumulate(rng.expovariate(chats_per_s) for _ in chats)
    requests = []
    for chat, begin_s in zip(chats, begins, strict=True):
        said: tuple[int, ...] = ()
        at_s = begin_s
        for number, turn in enumerate(chat.turns):
            at_s += turn.think_s if number else 0.0
            said += tuple(turn.token_ids)
            requests.append(
                Request(
                    name=f"{chat.name}/{number}",
                    token_ids=said,
                    max_tokens=turn.max_tokens,
                    at_s=at_s,
                    cache_salt=chat.cache_salt,
                )
            )
            said += tuple(rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(turn.max_tokens))
            at_s += answer_s
    return sorted(requests, key=lambda request: request.at_s)
