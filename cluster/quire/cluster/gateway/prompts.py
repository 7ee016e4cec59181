"""Turns clients' prompts into token ids, with limits on the cost.

    too long    refused by its length, before it is tokenized
    short text  at once, in the event loop
    long text   in a thread; all of them together are ``max_tokenizing_bytes`` at most
    any text    of a tokenizer whose work has no known bound: as a long one, in another process
    chat        rendered in a separate process (`TemplateProcess`), then as a text

Tokenizing takes 150 to 200 bytes of memory for each byte of text, so the budget counts bytes. A
text of more than half of the budget waits for others like it and leaves half of the budget to
shorter ones, which would otherwise wait for seconds. Tenants take turns at all that is waited for.
"""

import asyncio
import ctypes
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from math import inf
from typing import Any, TypeVar

import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from quire.cluster.gateway.deadline import late
from quire.cluster.serving.bounds import Budget, Hold, Inflight
from quire.worker.blocks.hashing import TokenIds, as_token_ids
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.limits import RequestLimits, check_prompt_length
from quire.worker.request.request import Chat, Prompt, Span, Text, Tokens
from quire.worker.text.template.process import TemplateLimits, TemplateProcess
from quire.worker.text.tokenizer import Tokenizer

T = TypeVar("T")

# Longer texts would delay every other stream by milliseconds.
_LONG_TEXT_CHARS = 4_000
_LONG_TOKENS = 1 << 16
_CHARS_PER_TOKEN = 4  # A rule of thumb.
# A text with more characters than this for each token that there is room for is likely too long.
_USUAL_CHARS_PER_TOKEN = 8
_PIECE_CHARS = 1 << 16
# A text that is cut into pieces has more tokens: usually by less than 0.1 %, never by a quarter.
_PIECES_EXCESS = 1.25
_TRIM_CHARS = 1 << 18


class Prompts:
    """Tokenizes prompts for one model. Belongs to one event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokenizing_bytes: int,
        max_waiting: int,
        template: TemplateLimits,
        registry: CollectorRegistry,
        refused: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_waiting``: most prompts in progress that are long or chats. ``refused`` is called
        before one more is refused."""
        self.budget = Budget(max_tokenizing_bytes)
        self.waiting = Inflight(
            max_waiting,
            "{num} prompts are being tokenized, --max-inflight is {limit}: try again in 1 s",
            refused=refused,
        )
        self._tokenizer = tokenizer
        self._clock = clock
        self._one_long = Budget(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._template: TemplateProcess | None = None
        if tokenizer.template is not None:
            self._template = TemplateProcess(tokenizer.template, template)
            # One thread, because the process renders one chat at a time.
            self._renders = ThreadPoolExecutor(1, "quire-template")
            self._one_render = Budget(1)
        for name, help_text, value in (
            ("held", "Bytes of text that are being tokenized.", lambda: self.budget.held),
            ("waiting", "Bytes of text that wait to be.", lambda: self.budget.waiting),
        ):
            gauge = Gauge(f"quire_tokenizing_bytes_{name}", help_text, registry=registry)
            gauge.set_function(value)

    def close(self) -> None:
        """Ends the thread and the process of the chat template."""
        if self._template is not None:
            self._renders.shutdown(wait=False, cancel_futures=True)
            self._template.close()

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        limits: RequestLimits | None = None,
        deadline_s: float = inf,
        tenant: str = "",
    ) -> Sequence[int]:
        """The prompt's token ids. With ``limits``, each span's length is checked.

        Raises:
            InvalidRequest: The chat template refuses it, or a span is too long (ContextExceeded).
            Overloaded: Too many prompts wait already.
            DeadlineExceeded: ``deadline_s`` passed before the prompt's turn.
        """
        spans = [await self._tokens_of(span, limits, deadline_s, tenant) for span in prompt]
        return spans[0] if len(spans) == 1 else list(chain.from_iterable(spans))

    async def spell_out(self, num_chars: int, work: Callable[[], T], *, tenant: str = "") -> T:
        """Runs ``work``, which tokenizes ``num_chars`` characters, in a thread if that takes
        long."""
        size = num_chars if self._tokenizer.encodes_here or not num_chars else _LONG_TEXT_CHARS
        return await self._at_once_or_in_turn(size, 8 * num_chars, work, tenant)

    async def detokenize(
        self, token_ids: TokenIds, *, skip_special_tokens: bool, tenant: str = ""
    ) -> str:
        """The text of ``token_ids``, all of them in the vocabulary."""
        decode = partial(self._tokenizer.decode, skip_special_tokens=skip_special_tokens)
        return await self._at_once_or_in_turn(
            len(token_ids), token_ids.nbytes, lambda: decode(token_ids.tolist()), tenant
        )

    async def _at_once_or_in_turn(
        self, size: int, num_bytes: int, work: Callable[[], T], tenant: str
    ) -> T:
        if size < _LONG_TEXT_CHARS:
            return work()
        with self.waiting.entered(tenant=tenant):
            return await self._in_turn(num_bytes, work, deadline_s=inf, tenant=tenant)

    async def _tokens_of(
        self, span: Span, limits: RequestLimits | None, deadline_s: float, tenant: str
    ) -> Sequence[int]:
        if isinstance(span, Tokens):
            if limits is not None:
                check_prompt_length(len(span.token_ids), limits)
            return span.token_ids
        if isinstance(span, Chat):
            with self.waiting.entered(tenant=tenant):
                rendered = await self._render(span, deadline_s, tenant)
            span = Text(rendered, add_special_tokens=False)  # The template has added them.
        text, special = span.text, span.add_special_tokens
        if limits is not None:
            await self._check_length(text, limits)
        if len(text) < _LONG_TEXT_CHARS and self._tokenizer.encodes_here:
            return self._tokenizer.encode(text, add_special_tokens=special)
        encode = partial(self._encode, text, add_special_tokens=special, limits=limits)
        num_bytes = len(text) * (1 if text.isascii() else 4)
        with self.waiting.entered(tenant=tenant):
            return await self._in_turn(num_bytes, encode, deadline_s=deadline_s, tenant=tenant)

    async def _check_length(self, text: str, limits: RequestLimits) -> None:
        bound = self._tokenizer.bound
        if bound is None or len(text) < bound.max_chars * limits.max_prompt_len:
            return
        # With `swallows_space`, the bound takes a pass over the text; else a division.
        num_steps = len(text) if bound.swallows_space else 0
        least = await off_loop(num_steps, partial(bound.fewest_tokens, text))
        known_as = f"{len(text)} characters, {least} tokens or more"
        check_prompt_length(least, limits, known_as=known_as)

    async def _render(self, chat: Chat, deadline_s: float, tenant: str) -> str:
        if self._template is None or not chat.messages:
            return self._tokenizer.render_chat(chat.messages)  # Raises what is missing.
        render = partial(
            self._template.render,
            chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            template_kwargs=chat.template_kwargs,
        )
        turn = await self._until(deadline_s, self._one_render.take(1, tenant))
        running = asyncio.get_running_loop().run_in_executor(self._renders, render)
        running.add_done_callback(lambda _: turn.release())
        return await self._until(deadline_s, running)

    async def _in_turn(
        self, num_bytes: int, work: Callable[[], T], *, deadline_s: float, tenant: str
    ) -> T:
        """Runs ``work`` in a thread once ``num_bytes`` of the budget are free."""
        if num_bytes <= self.budget.limit // 2:
            hold = await self._until(deadline_s, self.budget.take(num_bytes, tenant))
            return await self._to_its_end(_in_thread(work, hold))
        locked = await self._until(deadline_s, self._one_long.take(1, tenant))
        try:
            half = self.budget.take(self.budget.limit // 2, tenant)
            hold = await self._until(deadline_s, half)
        except BaseException:
            locked.release()
            raise
        return await self._to_its_end(_in_thread(work, hold, locked))

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits ``work`` in a task that is not cancelled with the caller: its thread cannot be
        stopped, and must hold its share of the budget until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Marks it as seen: the caller may be gone.

    async def _until(self, deadline_s: float, waiting: Awaitable[T]) -> T:
        timeout_s = None if deadline_s == inf else deadline_s - self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            raise late() from None

    def _encode(
        self, text: str, *, add_special_tokens: bool, limits: RequestLimits | None
    ) -> Sequence[int]:
        try:
            if limits is not None and len(text) > _USUAL_CHARS_PER_TOKEN * limits.max_model_len:
                self._check_pieces(text, limits)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        finally:
            if len(text) >= _TRIM_CHARS:
                _give_memory_back()

    def _check_pieces(self, text: str, limits: RequestLimits) -> None:
        """Raises ContextExceeded as soon as the pieces so far have clearly too many tokens.
        Tokenizing the whole text first would take seconds and a gigabyte."""
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            num_tokens += len(self._tokenizer.encode(piece, add_special_tokens=False))
            num_chars = start + len(piece)
            known_as = f"{len(text)} characters, in the first {num_chars} alone {num_tokens} tokens"
            check_prompt_length(int(num_tokens / _PIECES_EXCESS), limits, known_as=known_as)


def rough_num_tokens(span: Span) -> int:
    """A rough number of tokens, for autoscaling before the first group has attached."""
    if isinstance(span, Tokens):
        return len(span.token_ids)
    if isinstance(span, Chat):
        texts = [str(message.get("content", "")) for message in span.messages]
    else:
        texts = [span.text]
    return sum(-(-len(text) // _CHARS_PER_TOKEN) for text in texts)


async def as_ids(token_ids: Sequence[int]) -> TokenIds:
    """`as_token_ids`, for long inputs in pieces between which the event loop runs."""
    if len(token_ids) <= _LONG_TOKENS:
        return as_token_ids(token_ids)
    ids = np.empty(len(token_ids), dtype=np.uint32)
    for start in range(0, len(ids), _LONG_TOKENS):
        ids[start : start + _LONG_TOKENS] = token_ids[start : start + _LONG_TOKENS]
        await asyncio.sleep(0)
    return ids


async def off_loop(num_steps: int, work: Callable[[], T]) -> T:
    """Runs ``work``, in a thread if it has many steps."""
    return work() if num_steps <= _LONG_TOKENS else await asyncio.to_thread(work)


def check_ids(name: str, token_ids: TokenIds, vocab_size: int) -> None:
    """Raises InvalidRequest: an id is not in the vocabulary. ``name`` is the parameter's."""
    foreign = np.flatnonzero(token_ids >= vocab_size)
    if len(foreign):
        raise InvalidRequest(
            f"{name}={token_ids[foreign[0]]} is not in the vocabulary: ids are 0 to "
            f"{vocab_size - 1}",
            param=name,
        )


async def _in_thread(work: Callable[[], T], *holds: Hold) -> T:
    try:
        return await asyncio.to_thread(work)
    finally:
        for hold in holds:
            hold.release()


def _give_memory_back() -> None:
    """Returns freed memory to the system, of which glibc keeps hundreds of megabytes. Takes 10
    ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
