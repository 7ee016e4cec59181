"""A request's types: the client's call, and the form that a group receives.

    Request     a client's call
    Prepared    the call, checked, tokenized and hashed

Both are frozen and are passed on whole. `Terms` declares the fields that both have. A completion
is a `Prepared` with ``n`` of 1; an attempt is a completion with the tokens generated so far.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire.worker.blocks.hashing import BlockHashes, Feature, HashChain, TokenIds, root_hash
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.model_card import ModelCard
from quire.worker.request.progress import Progress
from quire.worker.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.worker.text.reasoning import ReasoningFormat

MAX_SALT_CHARS = 1000
MAX_CACHE_KEY_CHARS = 1000
MAX_KEEP_S = 7 * 86_400.0
MAX_MESSAGES = 10_000
"""Most messages in one chat."""
MAX_TOOLS = 1024
"""Most tools in one chat, and most calls in one message."""

Task = Literal["generate", "embed"]
"""What a group does with a request: generate tokens, or compute one vector of its prompt."""
Output = Literal["hidden"]
"""Outputs for each token that a request can ask for besides log-probabilities: "hidden" is the
hidden state that the token was sampled from, after the model's last norm."""

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Fields that every stage passes on."""

    sampling: SamplingParams
    task: Task = "generate"
    priority: int = 0
    """Lower numbers run first; 0 is the default."""
    tenant: str = ""
    """The tenant that sent the request, without a "/"; empty if tenants are not distinguished."""
    key_name: str = ""
    """The name of its API key, for a gateway's usage counters. It is not sent to groups."""
    client_id: str = ""
    """The client's id of the request, under which its routing can be looked up."""
    explain_routing: bool = False
    """Whether the client is sent an explanation with every group that was considered."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that appear in the text, although other special tokens are left out."""
    reasoning: "ReasoningFormat | None" = None
    """The marks of the answer's reasoning, in which stop strings do not count."""
    cache_key: str = ""
    """Requests with the same key go to the same group if groups are otherwise equal."""
    keep_s: float = 0.0
    """Least time in seconds that the prompt's blocks stay cached, within the tenant's share; 0
    leaves it to the eviction policy."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer adds its tokens around the text, such as a begin token."""


@dataclass(frozen=True, slots=True)
class Tokens:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, for the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of the assistant's turn."""
    continue_final_message: bool = False
    """Whether the text ends within the last message, so that the model continues it."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """More variables for the template, such as ``enable_thinking``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the model may call, as in OpenAI's API."""


Span = Text | Tokens | Chat
Prompt = tuple[Span, ...]
"""Spans that are tokenized one by one; the prompt is the concatenation of their tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Terms):
    """A client's request.

    Raises:
        InvalidRequest: A value is out of range; the message names it.
    """

    prompt: Prompt
    cache_salt: str = ""
    """The salt that the client sent. `salt` adds the tenant."""
    timeout_s: float | None = None
    """Seconds from the request's arrival to its last token; ``None``: no limit."""

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
        """The salt of the prompt's block hashes. Requests with the same salt share cached prefixes.
        Two tenants never have the same salt, whatever their clients send: no tenant has a "/".
        """
        return f"{self.tenant}/{self.cache_salt}" if self.tenant else self.cache_salt

    @property
    def terms(self) -> dict[str, Any]:
        """The fields of `Terms`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Terms)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared(Terms):
    """A request for a group, or for an engine in this process.

    A gateway has set ``sampling.seed`` and ``sampling.max_tokens`` to numbers; the engine does so
    if they are ``None``. A group receives only the fields that `quire.cluster.wire` sends.
    """

    request_id: str
    """Unique among the requests that the engine has at the same time."""
    prompt_token_ids: TokenIds
    completion: int = 0
    """Index of this completion among those of the same prompt."""
    resumed_token_ids: TokenIds = field(default_factory=lambda: _NO_TOKENS)
    """Output that earlier attempts have already generated. This attempt continues after it."""
    outputs: frozenset[Output] = frozenset()
    features: tuple[Feature, ...] = ()
    """Other content that some of the prompt's tokens are placeholders for, in order."""
    source: PeerSource | None = None
    """Another group that holds blocks of the prompt, which may be fetched instead of computed."""
    adapter: str = ""
    """The digest of the adapter's content; empty for the base model."""
    cache_salt: str = ""
    """The salt with the tenant's name. Only requests with the same salt share cached prefixes."""
    is_checked: bool = False
    """Whether a gateway has checked the request against its groups' limits."""
    hashes: BlockHashes = field(default_factory=BlockHashes)
    """The names of the prompt's full blocks."""
    model: ModelCard | None = None
    """The model for which the prompt was tokenized and hashed. Groups know their own model."""
    arrival_s: float = 0.0
    deadline_s: float = inf
    """Arrival and deadline are on the gateway's clock."""
    progress: Progress | None = None
    """Where the engine records its work on the request; ``None`` if nobody reads that."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the prompt and its hashes take."""
        return self.prompt_token_ids.nbytes + len(self.hashes.data)

    def chain(
        self, *, model_fingerprint: str, numerics: str, kv_dtype: str, block_size: int
    ) -> HashChain:
        """The hash chain that names the request's blocks for a model. All callers use this one."""
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
        """A copy for ``card``'s model, with the names of the prompt's full blocks."""
        chain = self.chain(
            model_fingerprint=card.model_fingerprint,
            numerics=card.numerics,
            kv_dtype=card.kv_dtype,
            block_size=card.block_size,
        )
        return replace(self, model=card, hashes=chain.extend(self.prompt_token_ids))

    def completions(self) -> Iterator["Prepared"]:
        """One request for each of the ``sampling.n`` completions, with consecutive seeds. Only the
        first returns log-probabilities of the prompt."""
        for number in range(self.sampling.n):
            yield replace(
                self,
                completion=number,
                request_id=f"{self.request_id}-{number}",
                sampling=self.sampling.of_completion(number),
            )
