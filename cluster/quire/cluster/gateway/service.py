"""A gateway, whatever the transport: checks a request, tokenizes and hashes it once, streams it.

Knows neither HTTP nor gRPC; both are thin layers over `Gateway`. Imports no torch: the tokens come
from the groups.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from quire.cluster.admission.config import AdmissionConfig
from quire.cluster.admission.queue import AdmissionQueue, unavailable
from quire.cluster.admission.ticket import Ticket
from quire.cluster.errors import ModelNotFound
from quire.cluster.failover.completion import Completion
from quire.cluster.failover.completion_request import CompletionConfig, CompletionRequest
from quire.cluster.failover.ending import Ending
from quire.cluster.failover.resume import Resumes
from quire.cluster.gateway.deadline import late, until
from quire.cluster.gateway.generation import Chat, Generation, GenerationRequest, numbered
from quire.cluster.gateway.inflight import Inflight
from quire.cluster.gateway.merge import merge
from quire.cluster.gateway.telemetry import Telemetry
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import ModelCard
from quire.router.table import RoutingTable
from quire.v1 import inference_pb2 as pb
from quire.worker.errors import InvalidRequest
from quire.worker.hashing import BlockHashes, TokenIds, as_token_ids, hash_blocks
from quire.worker.request import Request, RequestLimits, check_request
from quire.worker.sampling_params import MAX_SEED
from quire.worker.text import Tokenizer

# Encoding a long text holds up every other stream for milliseconds, unless a thread does it.
_LONG_TEXT_CHARS = 4_000


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The limits of one gateway; those of its waiting requests are in ``admission``."""

    max_inflight: int = 4096
    """Completions under way; a request that would exceed it is refused."""
    max_completions: int = 1024
    """Prompts × n of one HTTP request."""
    wakes_groups: bool = False
    """Groups are started for requests that wait here: it takes them although no group is there."""
    completion: CompletionConfig = field(default_factory=CompletionConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)


class Gateway:
    """Takes requests for one model and has the groups serve them.

    Made and used inside one event loop. ``groups`` and ``table`` are the caller's to close.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        groups: Groups,
        table: RoutingTable,
        config: GatewayConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.groups = groups
        self.table = table
        self.telemetry = Telemetry(groups=groups, table=table)
        self.config = config or GatewayConfig()
        self.admission = AdmissionQueue(
            self.config.admission,
            groups=groups,
            table=table,
            registry=self.telemetry.registry,
            start_wait_s=self.config.completion.group_wait_s,
            clock=clock,
        )
        self._clock = clock
        self._resumes = Resumes(self.config.completion.resume, clock=clock)
        self.telemetry.retry_budget.set_function(lambda: self._resumes.budget.level)
        self.telemetry.suspects.set_function(lambda: self._resumes.probation.num_suspects)
        self._inflight = Inflight(
            limit=self.config.max_inflight,
            gauge=self.telemetry.inflight,
            refused=partial(self.admission.refused, "inflight"),
        )
        self._is_draining = False
        self._watchers: list[Callable[[], None]] = []
        groups.watch(self._notify)

    @property
    def is_ready(self) -> bool:
        """Whether new requests should come here."""
        can_serve = self.groups.num_ready > 0 or self.config.wakes_groups
        return can_serve and not self._is_draining

    @property
    def num_inflight(self) -> int:
        """Completions under way."""
        return self._inflight.num

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def begin_drain(self) -> None:
        """Tells health checks that no new requests should come; those that do are served."""
        self._is_draining = True
        self.groups.begin_drain()
        self._notify()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` when `is_ready` may have changed."""
        self._watchers.append(on_change)

    async def prepare(self, request: GenerationRequest) -> "Generation":
        """Checks, tokenizes and hashes a request. Nothing is sent yet.

        Raises:
            ModelNotFound: Another model is served here.
            InvalidRequest: The message names what is wrong with the request.
            Unavailable: No group was ever here, so nothing is known of the model.
            Overloaded: Too many requests wait to take another, whatever its size.
            DeadlineExceeded: The same, and the request cannot wait any longer.
        """
        arrival_s = self._clock()
        deadline_s = inf if request.timeout_s is None else arrival_s + request.timeout_s
        self.check_model(request.model)
        self.admission.check(request.priority)
        if request.prompt == "":  # Though a tokenizer may put a begin token there.
            raise InvalidRequest("prompt is empty: at least one token")
        token_ids = as_token_ids(await self.tokenize(request.prompt))
        card = await self.card(num_prompt_tokens=len(token_ids), deadline_s=deadline_s)
        limits = RequestLimits(
            vocab_size=card.vocab_size,
            max_model_len=card.max_model_len,
            reason="the groups' limit",
        )
        params = request.params
        max_tokens = check_request(
            Request(request_id="", prompt_token_ids=token_ids, params=params), limits
        )
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        return Generation(
            request_id=secrets.token_hex(12),
            card=card,
            token_ids=token_ids,
            hashes=_hash_prompt(card, token_ids, request.cache_salt),
            params=replace(
                params, seed=seed, max_tokens=max_tokens, top_k=min(params.top_k, card.vocab_size)
            ),
            cache_salt=request.cache_salt,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            priority=request.priority,
            client_id=request.client_id,
            explain_routing=request.explain_routing,
        )

    async def tokenize(
        self, prompt: str | Sequence[int] | Chat, *, add_special_tokens: bool = True
    ) -> Sequence[int]:
        """The prompt's token ids. Raises InvalidRequest: the chat template refuses it."""
        if isinstance(prompt, Chat):
            text = self.tokenizer.render_chat(prompt.messages)
            add_special_tokens = False  # The template wrote them.
        elif isinstance(prompt, str):
            text = prompt
        else:
            return prompt
        if len(text) < _LONG_TEXT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``token_ids``. Raises InvalidRequest: one is not in the vocabulary."""
        card = await self.card()
        _check_ids("token_ids", token_ids, card.vocab_size)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def hash_prompt(self, token_ids: Sequence[int], cache_salt: str) -> BlockHashes:
        """The hashes of a prompt's full blocks; none before a first group told its model."""
        card = self.groups.card
        return (
            BlockHashes()
            if card is None
            else _hash_prompt(card, as_token_ids(token_ids), cache_salt)
        )

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound."""
        if model not in ("", self.model):
            raise ModelNotFound(f"the model {model!r} does not exist: {self.model!r} is served")

    def check_num_completions(self, num_completions: int) -> None:
        """Raises InvalidRequest: one request must not ask for that many."""
        if num_completions > self.config.max_completions:
            raise InvalidRequest(
                f"prompts × n is {num_completions}, at most {self.config.max_completions} are "
                "allowed in one request: send several"
            )

    async def card(self, *, num_prompt_tokens: int = 0, deadline_s: float = inf) -> ModelCard:
        """What the groups say of their model; waits for a first one as long as requests do.

        ``num_prompt_tokens``: of the request that waits, for those who start groups.

        Raises:
            Unavailable: None came.
            Overloaded: Too many wait already.
            DeadlineExceeded: The request's deadline passed.
        """
        if self.groups.card is not None:
            return self.groups.card
        give_up_s = self._clock() + self.config.completion.group_wait_s
        with self.admission.starting(num_prompt_tokens):
            while self.groups.card is None:
                remaining_s = min(give_up_s, deadline_s) - self._clock()
                if not await self.groups.wait_for_change(timeout_s=remaining_s):
                    raise late() if self._clock() >= deadline_s else unavailable(self.groups)
        return self.groups.card

    async def stream(
        self, generations: Sequence[Generation]
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the chunks of all completions of one client's request as they come.

        The completions are numbered through. They are admitted together, and share the first
        one's priority and deadline. Closing the generator aborts whatever still runs.

        Raises:
            Overloaded: They are refused; later, if something of higher priority took their place.
            DeadlineExceeded: The deadline has passed; what it left undone was aborted.
            And what `Completion.stream` does.
        """
        first = generations[0]
        num_completions = sum(generation.params.n for generation in generations)
        ticket = Ticket(
            num_requests=num_completions,
            num_prompt_tokens=sum(len(generation.token_ids) for generation in generations),
            max_tokens=first.params.max_tokens or 0,
            priority=first.priority,
            deadline_s=first.deadline_s,
        )
        ending = Ending(arrival_s=first.arrival_s, deadline_s=first.deadline_s)
        with self._inflight.entered(num_completions):
            async with self.admission.admit(ticket):
                completions = [self.completion(each, ending) for each in numbered(generations)]
                chunks = merge([completion.stream() for completion in completions])
                if first.deadline_s < inf:
                    chunks = until(first.deadline_s, chunks, clock=self._clock)
                self.admission.sending(ticket)
                async with aclosing(chunks):
                    async for chunk in chunks:
                        self.admission.took(ticket, num_tokens=len(chunk.token_ids))
                        yield chunk

    def completion(self, request: CompletionRequest, ending: Ending) -> Completion:
        """One completion over this gateway's groups, not begun and not admitted."""
        return Completion(
            request,
            groups=self.groups,
            table=self.table,
            tokenizer=self.tokenizer,
            telemetry=self.telemetry,
            config=self.config.completion,
            resumes=self._resumes,
            ending=ending,
            clock=self._clock,
        )

    def _notify(self) -> None:
        for on_change in self._watchers:
            on_change()


def _hash_prompt(card: ModelCard, token_ids: TokenIds, cache_salt: str) -> BlockHashes:
    root = card.root(cache_salt=cache_salt)
    return hash_blocks(token_ids, block_size=card.block_size, root=root)


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name}={token_id} is not in the vocabulary: ids are 0 to {vocab_size - 1}"
            )
