"""A request on its way: the client's call, and the form that a group gets.

    Request a client's call
    Prepared the same, checked, tokenized and hashed

Both are frozen and are handed on whole. A field that goes all the way stands once, in `Terms`. A
completion is a `Prepared` with ``n`` of 1; an attempt at it adds the output that is already there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Literal

import numpy as np

from quire.worker.api.errors import InvalidRequest
from quire.worker.api.hashing import BlockHashes, Feature, HashChain, TokenIds, root_hash
from quire.worker.api.kv_format import PeerSource
from quire.worker.api.model_card import ModelCard
from quire.worker.api.progress import Progress
from quire.worker.api.sampling_params import SamplingParams

MAX_SALT_CHARS = 1000
MAX_CACHE_KEY_CHARS = 1000
MAX_KEEP_S = 7 * 86_400.0
MAX_MESSAGES = 10_000
"""Messages in one chat."""
MAX_TOOLS = 1024
"""Tools in one chat, and calls in one message."""

Task = Literal["generate", "embed"]
"""What a group does with a request: "embed" makes one vector of its prompt."""
Output = Literal["hidden"]
"""What a request can want of each of its tokens besides log-probabilities: the hidden state that it
was drawn from, behind the model's last norm."""

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Fields that every stage passes on."""

    sampling: SamplingParams
    task: Task = "generate"
    priority: int = 0
    """Less runs sooner; 0 is the usual."""
    tenant: str = ""
    """The tenant whose request it is, without a "/"; empty if tenants are not distinguished."""
    key_name: str = ""
    """The name of its API key, by which a gateway counts what is used. Groups are not told."""
    client_id: str = ""
    """The client's name for it, by which its routing can be explained."""
    explain_routing: bool = False
    """Tell the client of every group that it could have gone to."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that the text has, although it leaves out the others."""
    cache_key: str = ""
    """Requests with the same one go to the same group, where groups are otherwise alike."""
    keep_s: float = 0.0
    """How long the prompt's blocks stay cached at least, within what a tenant may keep; 0 is as
    long as they are worth it."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    add_special_tokens: bool = True
    """Those that the tokenizer puts around a text, such as a begin token."""


@dataclass(frozen=True, slots=True)
class Tokens:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, for the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    """The text ends where the assistant's next turn begins."""
    continue_final_message: bool = False
    """The text ends within the last message, which the model goes on with."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the template, such as ``enable_thinking``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Those that the model may call, as in OpenAI's API."""


Span = Text | Tokens | Chat
Prompt = tuple[Span, ...]
"""Spans that are tokenized one by one and follow on from each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Terms):
    """A client's request.

    Raises:
        InvalidRequest: A value is out of its range; the message names it.
    """

    prompt: Prompt
    cache_salt: str = ""
    """The client's own."""
    timeout_s: float | None = None
    """From its arrival to its last token; ``None`` is as long as it takes."""

    def __post_init__(self) -> None:
        if not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest(
                f"priority={self.priority} is out of range: -2**31 to 2**31 - 1", param="priority"
            )
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt has {len(self.cache_salt)} characters: at most {MAX_SALT_CHARS}",
                param="cache_salt",
            )
        if len(self.cache_key) > MAX_CACHE_KEY_CHARS:
            raise InvalidRequest(
                f"prompt_cache_key has {len(self.cache_key)} characters: at most "
                f"{MAX_CACHE_KEY_CHARS}",
                param="prompt_cache_key",
            )
        if not 0 <= self.keep_s <= MAX_KEEP_S:
            raise InvalidRequest(
                f"keep_s={self.keep_s!r} is out of range: 0 to {MAX_KEEP_S:g} seconds",
                param="keep_s",
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidRequest(
                f"timeout={self.timeout_s!r} is out of range: above 0 seconds", param="timeout"
            )

    @property
    def salt(self) -> str:
        """The salt of the prompt's block hashes: requests with the same one share cached prefixes.
        No two tenants have one in common, whatever their clients send, since no tenant has a "/".
        """
        return f"{self.tenant}/{self.cache_salt}" if self.tenant else self.cache_salt

    @property
    def terms(self) -> dict[str, Any]:
        """The fields of `Terms`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Terms)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared(Terms):
    """A request for a group, or for an engine in this process.

    A gateway has put numbers into ``sampling.seed`` and ``sampling.max_tokens``; the engine does it
    where they are ``None``. A group sees only the fields that `quire.cluster.wire` sends.
    """

    request_id: str
    """Unlike that of any other request that the engine has at the same time."""
    prompt_token_ids: TokenIds
    completion: int = 0
    """Which of those that are drawn from the prompt it is."""
    resumed_token_ids: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    """Output that an earlier attempt has already produced: this one goes on behind it."""
    outputs: frozenset[Output] = frozenset()
    features: tuple[Feature, ...] = ()
    """Content that some of the prompt's tokens stand for, in order."""
    source: PeerSource | None = None
    """Another group that holds blocks of it, which may be fetched instead of computed."""
    adapter: str = ""
    """The digest of the content of the adapter to use; empty is the model alone."""
    cache_salt: str = ""
    """A salt that has the tenant's name. Only requests of the same salt share cached prefixes."""
    is_checked: bool = False
    """A gateway has checked it by its groups' limits."""
    hashes: BlockHashes = field(default_factory=BlockHashes)
    """The names of the prompt's full blocks."""
    model: ModelCard | None = None
    """The model for which it was tokenized and hashed. A group knows its own."""
    arrival_s: float = 0.0
    deadline_s: float = inf
    """Both on the gateway's clock."""
    progress: Progress | None = None
    """Where the engine notes what it does for it; ``None`` where nobody will read that."""

    @property
    def num_bytes(self) -> int:
        """Memory that its prompt takes up."""
        return self.prompt_token_ids.nbytes + len(self.hashes.data)

    def chain(
        self, *, model_fingerprint: str, numerics: str, kv_dtype: str, block_size: int
    ) -> HashChain:
        """Names its blocks for a model. Nothing else names those of a request."""
        root = root_hash(
            model_fingerprint=model_fingerprint,
            numerics=numerics,
            kv_dtype=kv_dtype,
            block_size=block_size,
            adapter=self.adapter,
            cache_salt=self.cache_salt,
        )
        return HashChain(root, block_size=block_size, features=self.features)

    def hashed_for(self, card: ModelCard) -> "Prepared":
        """The same for ``card``'s model, with the names of the prompt's full blocks."""
        chain = self.chain(
            model_fingerprint=card.model_fingerprint,
            numerics=card.numerics,
            kv_dtype=card.kv_dtype,
            block_size=card.block_size,
        )
        return replace(self, model=card, hashes=chain.extend(self.prompt_token_ids))

    def completions(self) -> Iterator["Prepared"]:
        """One for each of ``sampling.n``, their seeds one after another. Only the first scores the
        prompt."""
        for number in range(self.sampling.n):
            yield replace(
                self,
                completion=number,
                request_id=f"{self.request_id}-{number}",
                sampling=self.sampling.of_completion(number),
            )
