"""Checks, tokenizes and hashes requests, before anything is sent to a group."""

import secrets
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Self

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.tools import ToolUse
from quire.cluster.features.adapters.keeper import Adapter, Keeper
from quire.cluster.features.tenants.metering import Meter
from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.constraints import Constraints
from quire.cluster.gateway.deadline import late
from quire.cluster.gateway.prompts import Prompts, as_ids, check_ids, off_loop, rough_num_tokens
from quire.cluster.gateway.work import Parts
from quire.cluster.serving.queue import AdmissionQueue, unavailable
from quire.cluster.telemetry import timeline
from quire.worker.blocks.hashing import BlockHashes, TokenIds, as_token_ids
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.limits import (
    RequestLimits,
    check_embedding,
    check_prompt_length,
    check_request,
)
from quire.worker.request.model_card import ModelCard
from quire.worker.request.request import Chat, Prepared, Prompt, Request, Text
from quire.worker.request.sampling_params import MAX_SEED, SamplingParams
from quire.worker.request.scoring import EmbeddingUse, Scoring
from quire.worker.request.spelling import num_chars, spell_out, takes_any_length

MAX_TOKEN_IDS = 2**20
"""Most token ids in one prompt, or in one call to detokenize."""
_COUNTED_CONTEXTS = 4
_COUNTED_TOKENS = 2**16
"""A prompt that is counted or truncated may be as long as the longer of these, in contexts and in
tokens: enough to tell by how much it is too long. Longer ones would be tokenized for seconds."""


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a model can do besides generating text."""

    scoring: Scoring | None = None
    """How it scores a document for a query; ``None`` if it is no reranker."""
    use: EmbeddingUse = field(default_factory=EmbeddingUse)
    """How texts become prompts of an embedding model, and how its vectors are compared."""
    keeper: Keeper | None = None
    """Keeps the model's LoRA adapters; ``None`` if it takes none."""


class Preparer:
    """Prepares the requests for one model or adapter."""

    def __init__(
        self,
        model: str,
        parts: Parts,
        *,
        config: GatewayConfig,
        admission: AdmissionQueue,
        abilities: Abilities,
    ) -> None:
        self.model = model
        """The name in answers: the model's name, or that of ``adapter``."""
        self.adapter: Adapter | None = None
        """The adapter that all requests use; ``None`` for the base model."""
        self.scoring, self.use, self.keeper = abilities.scoring, abilities.use, abilities.keeper
        self.tokenizer = parts.tokenizer
        self.groups = parts.groups
        self.admission = admission
        self.dialect = choose_dialect(
            parts.tokenizer,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        """How the model writes tool calls and reasoning."""
        self.prompts = Prompts(
            parts.tokenizer,
            max_tokenizing_bytes=config.max_tokenizing_bytes,
            max_waiting=config.admission.max_inflight,
            template=config.template,
            registry=parts.telemetry.registry,
            refused=partial(admission.refused, "inflight"),
            clock=parts.clock,
        )
        self.constraints = Constraints(
            parts.tokenizer,
            max_waiting=config.admission.max_inflight,
            refused=partial(admission.refused, "inflight"),
            clock=parts.clock,
        )
        self._group_wait_s = parts.config.group_wait_s
        self.meter = Meter(refused=admission.refused)
        self._clock = parts.clock
        self._preparing = set[object]()  # Shared with adapters (`through`).

    def close(self) -> None:
        """Ends the threads and processes that prepare requests. None may be prepared any more."""
        self.prompts.close()
        self.constraints.close()

    def through(self, adapter: Adapter) -> Self:
        """A copy of this object whose requests use ``adapter``. It shares everything else with
        this one."""
        adapted = copy(self)
        adapted.model, adapted.adapter = adapter.name, adapter
        return adapted

    async def prepare(self, request: Request, *, tool_use: ToolUse | None = None) -> Prepared:
        """Checks, tokenizes and hashes a request. Nothing is sent yet.

        ``tool_use``: a chat's tools and how they may be called. The output's constraint then
        covers tool calls in the model's dialect.

        Raises:
            InvalidRequest: The message names what is wrong with the request.
            Unavailable: No group ever attached, so the model's limits are unknown.
            Overloaded: Too many requests wait to accept another of any size.
            RateLimited: The tenant has used up one of its limits.
            DeadlineExceeded: The request's deadline passed while it was prepared.
        """
        this = object()
        self._preparing.add(this)
        try:
            return await self._prepare(request, tool_use)
        finally:
            self._preparing.discard(this)

    async def _prepare(self, request: Request, tool_use: ToolUse | None) -> Prepared:
        arrival_s = self._clock()
        deadline_s = inf if request.timeout_s is None else arrival_s + request.timeout_s
        priority = self._check_room(request)
        _check_has_prompt(request)
        num_prompt_tokens = sum(map(rough_num_tokens, request.prompt))
        card = await self.card(num_prompt_tokens=num_prompt_tokens, deadline_s=deadline_s)
        sampling, token_ids = await self._tokenize(request, card, deadline_s=deadline_s)
        sampling = await self._constrain(
            request,
            sampling,
            token_ids,
            tool_use,
            vocab_size=card.vocab_size,
            deadline_s=deadline_s,
        )
        sampling = sampling.changed(
            seed=secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed,
            top_k=min(sampling.top_k, card.vocab_size),
        )
        prepared = Prepared(
            **request.terms | {"sampling": sampling, "priority": priority},
            request_id=secrets.token_hex(12),
            prompt_token_ids=token_ids,
            adapter=self.adapter.digest if self.adapter else "",
            cache_salt=request.salt,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
        )
        hashed = await off_loop(len(token_ids), partial(prepared.hashed_for, card))
        call = timeline.current()
        call.request_id = call.request_id or hashed.request_id
        call.model, call.operation = self.model, request.task
        call.is_chat = any(isinstance(span, Chat) for span in request.prompt)
        call.priority, call.sampling = priority, call.sampling or sampling
        call.num_prompt_tokens += len(token_ids)
        call.prepared()
        return hashed

    def _check_room(self, request: Request) -> int:
        """Returns the request's priority. Raises RateLimited or Overloaded: it would be refused
        whatever its size."""
        policy = self.meter.policy(request.tenant)
        priority = policy.priority(request.priority)
        self.meter.check(request.tenant)
        self.admission.check(priority, tenant=request.tenant, weight=policy.weight)
        return priority

    async def _tokenize(
        self, request: Request, card: ModelCard, *, deadline_s: float
    ) -> tuple[SamplingParams, TokenIds]:
        """The sampling parameters with numbers in place of words, and the prompt's token ids."""
        limits = RequestLimits(
            vocab_size=card.vocab_size,
            max_model_len=card.max_model_len,
            reason="the groups' limit",
            task=request.task,
        )
        bounds = _countable(card) if takes_any_length(request.sampling) else limits
        tenant = request.tenant
        token_ids = await as_ids(
            await self.prompts.tokenize(
                request.prompt, limits=bounds, deadline_s=deadline_s, tenant=tenant
            )
        )
        spelled = partial(
            spell_out,
            request.sampling,
            token_ids,
            tokenizer=lambda: self.tokenizer,
            reasoning=lambda _: self.dialect.reasoning,
            max_model_len=card.max_model_len,
            task=request.task,
        )
        sampling, token_ids = await self.prompts.spell_out(
            num_chars(request.sampling), spelled, tenant=tenant
        )
        if request.task == "embed":
            check_embedding(token_ids, limits)
            max_tokens = 1
        else:
            max_tokens = check_request(token_ids, sampling, limits)
        return sampling.changed(max_tokens=max_tokens), token_ids

    async def _constrain(
        self,
        request: Request,
        sampling: SamplingParams,
        token_ids: TokenIds,
        tool_use: ToolUse | None,
        *,
        vocab_size: int,
        deadline_s: float,
    ) -> SamplingParams:
        """The parameters with the constraint on the output, which groups would serve."""
        if tool_use is not None and (tool_use.has_form or sampling.constraint is not None):
            reasons = self.dialect.reasons(self.tokenizer, token_ids)
            form = constrain(self.dialect, tool_use, sampling.constraint, reasons=reasons)
            sampling = sampling.changed(structured_outputs=form)
        if sampling.constraint is not None:
            try:
                await self.constraints.check(
                    sampling.constraint,
                    tenant=request.tenant,
                    vocab_size=vocab_size,
                    deadline_s=deadline_s,
                )
            except InvalidRequest as error:
                if tool_use is not None and tool_use.has_form:
                    raise InvalidRequest(f"tools: {error}", param="tools") from None
                raise
        return sampling

    async def tokenize(self, prompt: Prompt, *, tenant: str) -> Sequence[int]:
        """The token ids of ``prompt``. Raises InvalidRequest: it has many more tokens than a
        request may have."""
        limits = _countable(await self.card())
        token_ids = await self.prompts.tokenize(prompt, limits=limits, tenant=tenant)
        check_prompt_length(len(token_ids), limits)
        return token_ids

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, tenant: str
    ) -> str:
        """The text of ``token_ids``. Raises InvalidRequest: one is not in the vocabulary, or there
        are more than `MAX_TOKEN_IDS`."""
        if len(token_ids) > MAX_TOKEN_IDS:
            raise InvalidRequest(
                f"token_ids has {len(token_ids)}: at most {MAX_TOKEN_IDS}", param="token_ids"
            )
        card = await self.card()
        ids = await as_ids(token_ids)
        check_ids("token_ids", ids, card.vocab_size)
        return await self.prompts.detokenize(
            ids, skip_special_tokens=skip_special_tokens, tenant=tenant
        )

    def hash_prompt(self, token_ids: Sequence[int], cache_salt: str) -> BlockHashes:
        """The hashes of a prompt's full blocks; empty before the first group attached."""
        if self.groups.card is None:
            return BlockHashes()
        prompt = Prepared(
            request_id="",
            prompt_token_ids=as_token_ids(token_ids),
            sampling=SamplingParams(),
            cache_salt=cache_salt,
        )
        return prompt.hashed_for(self.groups.card).hashes

    async def card(self, *, num_prompt_tokens: int = 0, deadline_s: float = inf) -> ModelCard:
        """The groups' model card. Waits up to `group_wait_s` for the first group.

        ``num_prompt_tokens``: prompt tokens of the waiting request, for autoscaling.

        Raises:
            Unavailable: No group attached in time.
            Overloaded: Too many requests wait already.
            DeadlineExceeded: The request's deadline passed.
        """
        if self.groups.card is not None:
            return self.groups.card
        give_up_s = self._clock() + self._group_wait_s
        with self.admission.starting(num_prompt_tokens):
            while self.groups.card is None:
                if not self.groups.may_come:
                    raise unavailable(self.groups)
                remaining_s = min(give_up_s, deadline_s) - self._clock()
                if not await self.groups.wait_for_change(timeout_s=remaining_s):
                    raise late() if self._clock() >= deadline_s else unavailable(self.groups)
        return self.groups.card


def _check_has_prompt(request: Request) -> None:
    """Refuses an empty text, even if the tokenizer would add a begin token."""
    if all(isinstance(span, Text) and not span.text for span in request.prompt):
        name = "input" if request.task == "embed" else "prompt"
        raise InvalidRequest(f"{name} is empty: at least one token", param=name)


def _countable(card: ModelCard) -> RequestLimits:
    """The limits of a prompt that need not fit into the model's context."""
    most = max(_COUNTED_CONTEXTS * card.max_model_len, _COUNTED_TOKENS)
    return RequestLimits(
        vocab_size=card.vocab_size,
        max_model_len=min(most, MAX_TOKEN_IDS),
        reason=f"the most that is tokenized beyond the groups' limit, {card.max_model_len}",
        task="embed",
    )
