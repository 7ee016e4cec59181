"""What clients ask for, before and after it was checked, tokenized and hashed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.cluster.failover.completion_request import CompletionRequest
from quire.cluster.failover.resume import Blame
from quire.cluster.model_card import ModelCard
from quire.worker.errors import InvalidRequest
from quire.worker.hashing import BlockHashes, TokenIds
from quire.worker.sampling_params import MAX_SEED, SamplingParams

MAX_SALT_CHARS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """A prompt made of messages, for the model's chat template."""

    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What a client asks for."""

    prompt: str | Sequence[int] | Chat
    params: SamplingParams
    model: str = ""
    """Empty is the only one."""
    cache_salt: str = ""
    priority: int = 0
    """Less is sooner."""
    timeout_s: float | None = None
    """From its arrival to its last token; ``None`` is as long as it takes."""
    client_id: str = ""
    """What the client calls it; explanations of its routing can be asked for by that name."""
    explain_routing: bool = False
    """Tell of every group that it could have gone to."""

    def __post_init__(self) -> None:
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(f"priority={self.priority} is out of range: -2**31 to 2**31 - 1")
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt has {len(self.cache_salt)} characters: at most {MAX_SALT_CHARS}"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidRequest(f"timeout={self.timeout_s!r} is out of range: above 0 seconds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A request that was found good: ``params.n`` completions, ready to stream."""

    request_id: str
    card: ModelCard
    token_ids: TokenIds
    hashes: BlockHashes
    params: SamplingParams
    cache_salt: str
    arrival_s: float
    deadline_s: float
    priority: int
    client_id: str
    explain_routing: bool

    def requests(self, *, first_index: int) -> Iterator[CompletionRequest]:
        """One for each completion, numbered from ``first_index``, their seeds one after another."""
        assert self.params.seed is not None
        blame = Blame()
        for number in range(self.params.n):
            seed = (self.params.seed + number) % (MAX_SEED + 1)
            yield CompletionRequest(
                request_id=f"{self.request_id}-{number}",
                index=first_index + number,
                model=self.card,
                prompt_token_ids=self.token_ids,
                hashes=self.hashes,
                params=replace(self.params, n=1, seed=seed),
                cache_salt=self.cache_salt,
                arrival_s=self.arrival_s,
                priority=self.priority,
                client_id=self.client_id,
                explain_routing=self.explain_routing,
                blame=blame,
            )


def numbered(generations: Sequence[Generation]) -> Iterator[CompletionRequest]:
    """The completions of several prompts, numbered through."""
    first_index = 0
    for generation in generations:
        yield from generation.requests(first_index=first_index)
        first_index += generation.params.n
