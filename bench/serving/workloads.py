"""The cluster's load: chats of many tenants.

All of it is token ids and follows from a seed, so that every policy is asked the same. A chat can
be held in a closed loop, where each prompt contains the real answers before it, or be laid out in
time with answers made up, so that arrivals do not depend on how quickly the cluster answers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.serving.load import Chat, Request, Turn

from quire.worker.api.errors import ConfigError

_FIRST_TOKEN_ID = 3  # Below are the specials of bench/peers' checkpoints.


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """Chats of tenants, of whom each has a system prompt; few have most of the chats.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    num_tenants: int = 40
    num_chats: int = 120
    system_tokens: tuple[int, int] = (500, 1500)
    """From, to; as are the next ones."""
    turns: tuple[int, int] = (1, 4)
    own_tokens: tuple[int, int] = (20, 80)
    answer_tokens: tuple[int, int] = (8, 24)
    think_s: float = 0.3
    """On average, before each turn."""
    skew: float = 1.0
    """The i-th tenant has a share of the chats as 1 / i ** skew."""
    vocab_size: int = 32_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_tenants", "num_chats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 1 or more")
        for name in ("system_tokens", "turns", "own_tokens", "answer_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ConfigError(f"{name}={least, most}: must be 1 or more, and in order")

    @property
    def longest(self) -> int:
        """Tokens of the longest request there may be, output included."""
        turn = self.own_tokens[1] + self.answer_tokens[1]
        return self.system_tokens[1] + self.turns[1] * turn


def tenant_chats(tenants: Tenants) -> list[Chat]:
    rng = random.Random(tenants.seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(
            rng.randrange(_FIRST_TOKEN_ID, tenants.vocab_size) for _ in range(rng.randint(*bounds))
        )

    systems = [tokens(tenants.system_tokens) for _ in range(tenants.num_tenants)]
    weights = [1 / (i + 1) ** tenants.skew for i in range(tenants.num_tenants)]
    chats = []
    for number in range(tenants.num_chats):
        (tenant,) = rng.choices(range(tenants.num_tenants), weights)
        turns = [
            Turn(
                token_ids=(systems[tenant] if not i else ()) + tokens(tenants.own_tokens),
                max_tokens=rng.randint(*tenants.answer_tokens),
                think_s=rng.expovariate(1 / tenants.think_s) if tenants.think_s else 0.0,
            )
            for i in range(rng.randint(*tenants.turns))
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
            said += tuple(
                rng.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(turn.max_tokens)
            )
            at_s += answer_s
    return sorted(requests, key=lambda request: request.at_s)
