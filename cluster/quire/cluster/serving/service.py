"""Serves one model at a gateway: checks, tokenizes and hashes each request once, and streams it.

The module knows neither HTTP nor gRPC; both find the service in the gateway's `Models`. It imports
no torch: the tokens come from the groups.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from math import inf

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.tools import ToolUse
from quire.cluster.failover.chunk import Chunk
from quire.cluster.failover.completion import Completion, Meter, Take
from quire.cluster.failover.ending import Ending
from quire.cluster.failover.resume import Blame, CompletionConfig, Resumes
from quire.cluster.features.adapters.keeper import Adapter, Keeper
from quire.cluster.features.tenants.limits import Tenants
from quire.cluster.features.tenants.metering import Metering, Used
from quire.cluster.features.tenants.usage import UsageLedger
from quire.cluster.links.groups import Groups
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.bounds import Inflight
from quire.cluster.serving.constraints import Constraints
from quire.cluster.serving.deadline import Deadline, late
from quire.cluster.serving.prompts import Prompts, as_ids, check_ids, off_loop, rough_num_tokens
from quire.cluster.serving.queue import AdmissionQueue, unavailable
from quire.cluster.serving.ticket import Ticket
from quire.cluster.serving.together import together
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.metrics import Telemetry
from quire.cluster.wire import work_of
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import BlockHashes, as_token_ids
from quire.worker.request.errors import ConstraintRefused, InvalidRequest
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
from quire.worker.text.template.process import TemplateLimits
from quire.worker.text.tokenizer import Tokenizer

MAX_COMPLETIONS = 1024
"""Most completions (prompts × n) of one HTTP request."""
MAX_TOKEN_IDS = 2**20
"""Most token ids in one prompt, or in one call to detokenize."""
_COUNTED_CONTEXTS = 4
_COUNTED_TOKENS = 2**16
"""A prompt that is counted or truncated may be as long as the longer of these, in contexts and in
tokens: enough to tell by how much it is too long. Longer ones would be tokenized for seconds."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """One model's limits at one gateway; ``admission`` has the limits of its waiting requests."""

    max_tokenizing_bytes: int = 2**20
    """Bytes of text that are tokenized at a time, each of which takes 150 to 200 bytes of memory.
    A text longer than half of this counts as half."""
    template: TemplateLimits = field(default_factory=TemplateLimits)
    """Limits on rendering one chat."""
    tool_call_parser: str = "auto"
    """The format in which the model writes tool calls, a name in `quire.cluster.dialects.formats`;
    "auto" derives it from the model's response template or chat template, "none" leaves calls as
    text. ``reasoning_parser`` is likewise the format of reasoning."""
    reasoning_parser: str = "auto"
    wakes_groups: bool = False
    """Requests are accepted even if no group runs, because groups are started for waiting
    requests."""
    completion: CompletionConfig = field(default_factory=CompletionConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)


class ModelService:
    """Takes requests for one model and has the groups serve them.

    It is made and used inside one event loop. The caller closes ``groups`` and ``table``.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: Tokenizer,
        groups: Groups,
        table: RoutingTable,
        scoring: Scoring | None = None,
        use: EmbeddingUse | None = None,
        keeper: Keeper | None = None,
        config: GatewayConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        """The name in answers: the model's name, or that of ``adapter``."""
        self.adapter: Adapter | None = None
        """The adapter that all requests to this service use; ``None`` for the base model."""
        self.scoring = scoring
        """How the model scores a document for a query; ``None`` if it is no reranker."""
        self.use = use or EmbeddingUse()
        """How texts become prompts of an embedding model, and how its vectors are compared."""
        self.keeper = keeper
        """Keeps the model's LoRA adapters; ``None`` if it takes none."""
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
        self.meter_by(Tenants(), UsageLedger())
        self.dialect = choose_dialect(
            tokenizer,
            tool_call_parser=self.config.tool_call_parser,
            reasoning_parser=self.config.reasoning_parser,
        )
        """How the model writes tool calls and reasoning."""
        self._clock = clock
        self._preparing = set[object]()  # Shared with the services of adapters (`through`).
        self._resumes = Resumes(self.config.completion, clock=clock)
        self.telemetry.retry_budget.set_function(lambda: self._resumes.budget.level)
        self.telemetry.isolated.set_function(lambda: self._resumes.isolation.num_completions)
        self._inflight = Inflight(
            self.config.admission.max_inflight,
            "{num} completions are under way, {more} more exceed the gateway's --max-inflight "
            "{limit}: try again in 1 s",
            refused=partial(self.admission.refused, "inflight"),
        )
        self.telemetry.inflight.set_function(lambda: self.num_inflight)
        self.prompts = Prompts(
            tokenizer,
            max_tokenizing_bytes=self.config.max_tokenizing_bytes,
            max_waiting=self.config.admission.max_inflight,
            template=self.config.template,
            registry=self.telemetry.registry,
            refused=partial(self.admission.refused, "inflight"),
            clock=clock,
        )
        self._constraints = Constraints(
            tokenizer,
            max_waiting=self.config.admission.max_inflight,
            refused=partial(self.admission.refused, "inflight"),
            clock=clock,
        )

    def meter_by(self, tenants: Tenants, usage: UsageLedger) -> None:
        """Enforces the limits of ``tenants`` and counts requests in ``usage`` from now on. All
        models of a gateway share both."""
        self._metering = Metering(tenants, usage, refused=self.admission.refused)

    def through(self, adapter: Adapter) -> "ModelService":
        """A copy of this service whose requests use ``adapter``. It shares everything else with
        this one."""
        adapted = copy(self)
        adapted.model, adapted.adapter = adapter.name, adapter
        return adapted

    @property
    def task(self) -> str:
        """The model's task: "generate", "embed" or "score"; empty until a group has named it."""
        return self.groups.task if self.scoring is None else "score"

    @property
    def can_serve(self) -> bool:
        """Whether a group takes requests, or one is started for waiting requests."""
        return self.groups.num_ready > 0 or self.config.wakes_groups

    @property
    def num_inflight(self) -> int:
        """Number of completions in progress."""
        return self._inflight.num

    @property
    def is_idle(self) -> bool:
        """Whether no request is being prepared or in progress."""
        return not (self._preparing or self.num_inflight)

    def close(self) -> None:
        """Ends the threads and processes that prepare requests. None may be prepared any more."""
        self.prompts.close()
        self._constraints.close()

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
        policy = self._metering.policy(request.tenant)
        priority = policy.priority(request.priority)
        self._metering.check(request.tenant)
        self.admission.check(priority, tenant=request.tenant, weight=policy.weight)
        if all(isinstance(span, Text) and not span.text for span in request.prompt):
            # Refused even if the tokenizer would add a begin token.
            name = "input" if request.task == "embed" else "prompt"
            raise InvalidRequest(f"{name} is empty: at least one token", param=name)
        num_prompt_tokens = sum(map(rough_num_tokens, request.prompt))
        card = await self.card(num_prompt_tokens=num_prompt_tokens, deadline_s=deadline_s)
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
        if tool_use is not None and (tool_use.has_form or sampling.constraint is not None):
            reasons = self.dialect.reasons(self.tokenizer, token_ids)
            form = constrain(self.dialect, tool_use, sampling.constraint, reasons=reasons)
            sampling = sampling.changed(structured_outputs=form)
        if sampling.constraint is not None:
            try:
                await self._constraints.check(
                    sampling.constraint,
                    tenant=request.tenant,
                    vocab_size=card.vocab_size,
                    deadline_s=deadline_s,
                )
            except InvalidRequest as error:
                if tool_use is not None and tool_use.has_form:
                    raise InvalidRequest(f"tools: {error}", param="tools") from None
                raise
        sampling = sampling.changed(
            seed=secrets.randbelow(MAX_SEED + 1) if sampling.seed is None else sampling.seed,
            max_tokens=max_tokens,
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

    def metered(self, tenant: str, key_name: str) -> AbstractContextManager[object]:
        """Counts a call that uses no group as a request of the tenant while the block runs. Raises
        RateLimited as `run`."""
        return self._metering.metered(tenant, key_name, Used())

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

    def check_num_completions(self, num_completions: int) -> None:
        """Raises InvalidRequest: ``num_completions`` are more than `MAX_COMPLETIONS`."""
        if num_completions > MAX_COMPLETIONS:
            raise InvalidRequest(
                f"prompts × n is {num_completions}, at most {MAX_COMPLETIONS} are "
                "allowed in one request: send several",
                param="n",
            )

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
        give_up_s = self._clock() + self.config.completion.group_wait_s
        with self.admission.starting(num_prompt_tokens):
            while self.groups.card is None:
                if not self.groups.may_come:
                    raise unavailable(self.groups)
                remaining_s = min(give_up_s, deadline_s) - self._clock()
                if not await self.groups.wait_for_change(timeout_s=remaining_s):
                    raise late() if self._clock() >= deadline_s else unavailable(self.groups)
        return self.groups.card

    async def run(
        self, requests: Sequence[Prepared], take: Take, *, shows_output: bool = True
    ) -> None:
        """Hands the chunks of all completions of one client's request to ``take`` as they arrive.

        ``requests`` are its prompts; completions are numbered across them. They are admitted
        together, and share the first one's priority and deadline. ``take`` gets one chunk at a
        time, in order within a completion. Cancelling the task that runs this aborts them all.
        ``shows_output``: whether output tokens are part of the answer, and are counted as used.

        Raises:
            Overloaded: The request is refused, or was displaced from the queue by another one.
            RateLimited: The tenant has used up one of its limits.
            DeadlineExceeded: The deadline has passed; unfinished completions were aborted.
            And whatever `Completion.run` raises.
        """
        first = requests[0]
        num_completions = sum(each.sampling.n for each in requests)
        num_prompt_tokens = sum(len(each.prompt_token_ids) for each in requests)
        ticket = Ticket(
            num_requests=num_completions,
            num_prompt_tokens=num_prompt_tokens,
            num_bytes=sum(each.num_bytes for each in requests),
            max_tokens=first.sampling.max_tokens or 0,
            priority=first.priority,
            deadline_s=first.deadline_s,
            tenant=first.tenant,
            weight=self._metering.policy(first.tenant).weight,
        )
        ending = Ending(arrival_s=first.arrival_s, deadline_s=first.deadline_s)
        used = Used.by(requests, shows_output=shows_output)
        with (
            self._metering.metered(
                first.tenant,
                first.key_name,
                used,
                num_completions=num_completions,
                num_prompt_tokens=num_prompt_tokens,
            ),
            self.admission.place_of(ticket, self._inflight),
        ):
            async with self.admission.admit(ticket):
                timeline.current().admitted()
                self.admission.sending(ticket)
                async with Deadline(first.deadline_s, clock=self._clock) as deadline:

                    def count(
                        index: int, *, num_tokens: int, num_cached_tokens: int | None = None
                    ) -> None:
                        cached = used.took(
                            index, num_tokens=num_tokens, num_cached_tokens=num_cached_tokens
                        )
                        self.admission.took(ticket, num_tokens=num_tokens, num_cached_tokens=cached)

                    async def pass_on(chunk: Chunk) -> None:
                        if not deadline.is_set:
                            await take(chunk)
                            return
                        with deadline.paused():
                            await take(chunk)

                    completions = self._completions(requests, ending, count)
                    try:
                        await together([completion.run for completion in completions], pass_on)
                    except ConstraintRefused as error:
                        if (constraint := first.sampling.constraint) is not None:
                            self._constraints.refuse(constraint, str(error), tenant=first.tenant)
                        raise

    def _completions(
        self, requests: Sequence[Prepared], ending: Ending, meter: Meter
    ) -> list[Completion]:
        """The completions of all ``requests``, numbered across them, not begun."""
        completions: list[Completion] = []
        for prompt in requests:
            blame, work = Blame(), work_of(prompt)
            completions += [
                Completion(
                    each,
                    work=work,
                    model=self.model,
                    index=index,
                    groups=self.groups,
                    table=self.table,
                    tokenizer=self.tokenizer,
                    telemetry=self.telemetry,
                    config=self.config.completion,
                    resumes=self._resumes,
                    ending=ending,
                    blame=blame,
                    meter=meter,
                    clock=self._clock,
                )
                for index, each in enumerate(prompt.completions(), len(completions))
            ]
        return completions


def _countable(card: ModelCard) -> RequestLimits:
    """The limits of a prompt that need not fit into the model's context."""
    most = max(_COUNTED_CONTEXTS * card.max_model_len, _COUNTED_TOKENS)
    return RequestLimits(
        vocab_size=card.vocab_size,
        max_model_len=min(most, MAX_TOKEN_IDS),
        reason=f"the most that is tokenized beyond the groups' limit, {card.max_model_len}",
        task="embed",
    )
