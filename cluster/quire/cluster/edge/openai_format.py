"""Generated chunks in the form of OpenAI's API: choices, deltas, log-probabilities, usage.

A `Format` lives as long as one HTTP request. It receives the chunks of all choices in the order in
which they arrive, and returns either the events of a stream or, at the end, the whole answer.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cluster.edge.openai_answer import Answer
from quire.cluster.edge.openai_logprobs import Logprobs
from quire.cluster.edge.openai_schema import CompletionBody, GenerationBody, StreamOptions
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.timing import timing_of
from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.request.request import Text
from quire.worker.request.spelling import takes_any_length
from quire.worker.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Echo:
    """Prompts that the answer repeats before their completions."""

    texts: list[str | None]
    """``None`` for a prompt that came as token ids or is truncated."""
    is_all: bool
    """Whether only the prompt is shown, and nothing that was generated."""
    token_ids: Sequence[TokenIds] = ()

    @classmethod
    def of(cls, body: GenerationBody) -> "Echo | None":
        """The echo that ``body`` asks for; ``None`` if it asks for none."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return None
        spans = [span for (span,) in body.prompts()]
        # The echo of a truncated prompt is decoded from the tokens that are left.
        is_whole = not takes_any_length(body.params())
        texts = [span.text if isinstance(span, Text) and is_whole else None for span in spans]
        return cls(texts, is_all=body.shows_only_prompt)

    async def read(
        self, token_ids: Sequence[TokenIds], detokenize: Callable[..., Awaitable[str]]
    ) -> None:
        """Takes the prompts' token ids, and decodes the texts of those that came as token ids or
        were truncated."""
        self.token_ids = token_ids
        for index, ids in enumerate(token_ids):
            if self.texts[index] is None:
                self.texts[index] = await detokenize(ids, skip_special_tokens=False)


class Format(ABC):
    """Base of all endpoints' formats: counts usage.

    ``num_per_prompt`` choices belong to each prompt; a prompt's tokens count once.
    """

    def __init__(
        self,
        *,
        reply_id: str,
        model: str,
        num_choices: int,
        num_per_prompt: int,
        tokenizer: Tokenizer,
        fingerprint: str,
        prompt_token_ids: Sequence[TokenIds] | None = None,
        scores: bool = False,
        echo: Echo | None = None,
        logprobs: Sequence[Logprobs] = (),
        answers: Sequence[Answer] = (),
        tells_timing: bool = False,
    ) -> None:
        """``fingerprint``: names everything besides the request that decides the bits of an answer.
        ``prompt_token_ids``: one entry per prompt; with it, answers show token ids. ``scores``:
        whether answers show the prompts' log-probabilities, which cannot be streamed.
        ``tells_timing``: whether they show the timing of steps. ``logprobs``: one entry per choice
        if log-probabilities are shown. ``answers``: one entry per choice of a chat."""
        self._echo = echo
        self._tells_timing = tells_timing
        self._scores: dict[int, Sequence[TokenLogprobs]] | None = {} if scores else None
        self._prompt_lens: dict[int, int] = {}
        self._header = {
            "id": reply_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._prompt_token_ids = prompt_token_ids
        self._num_per_prompt = num_per_prompt
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._answers = answers
        self._choices = [_Choice() for _ in range(num_choices)]
        self._num_prompt = self._num_cached = self._num_output = 0

    @classmethod
    def of(cls, body: GenerationBody) -> "Callable[..., Format]":
        """A factory for the format of the answer to ``body``."""
        return cls

    @abstractmethod
    def take(self, chunk: Chunk) -> None:
        """Adds a chunk to the whole answer."""

    @abstractmethod
    def whole(self) -> Json:
        """The answer to a request that does not stream."""

    @abstractmethod
    def stream(self, chunk: Chunk, options: StreamOptions) -> list[Json]:
        """The stream's events for one chunk; none if the chunk holds no text yet."""

    def stream_end(self, options: StreamOptions) -> Sequence[Json | str]:
        """The events that follow those of the last chunk."""
        return ()

    def stream_error(self, error: Json) -> Json:
        """The last event of a stream that fails. ``error`` has the form of `error_body`."""
        return error

    def failed(self, error: Json) -> Json:
        """A failed answer: the part that was generated, and ``error``."""
        return {**self.whole(), **error}

    @property
    def num_steps(self) -> int:
        """Roughly the cost of `whole`, in steps: with log-probabilities, up to 21 tokens per
        position are decoded one by one."""
        num_scores = sum(len(scores) for scores in (self._scores or {}).values())
        return self._num_output * (100 if self._logprobs else 1) + 100 * num_scores

    def _count(self, chunk: Chunk) -> None:
        if self._echo is None or not self._echo.is_all:
            self._num_output += len(chunk.token_ids)
        if chunk.start is not None and chunk.index % self._num_per_prompt == 0:
            self._num_prompt += chunk.start.num_prompt_tokens
            self._num_cached += chunk.start.num_cached_tokens


class ChoicesFormat(Format):
    """Base of both kinds of completions: builds answers of choices."""

    whole_object: str
    chunk_object: str

    def take(self, chunk: Chunk) -> None:
        self._count(chunk)
        if self._scores is not None and chunk.start is not None:
            prompt = chunk.index // self._num_per_prompt
            self._prompt_lens[prompt] = chunk.start.num_prompt_tokens
            if chunk.start.prompt_logprobs:
                self._scores[prompt] = chunk.start.prompt_logprobs
        choice = self._choices[chunk.index]
        choice.texts.append(chunk.text)
        choice.logprobs.extend(chunk.logprobs)
        choice.finish_reason, choice.stop_reason = chunk.finish_reason, chunk.stop_reason
        if self._prompt_token_ids is not None:
            choice.token_ids.extend(chunk.token_ids)

    def whole(self) -> Json:
        choices = [
            self._whole_choice(index)
            | {"stop_reason": choice.stop_reason}
            | self._shown_ids(index, choice.token_ids, is_first=True)
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._header,
            "object": self.whole_object,
            "choices": choices,
            "usage": self._usage(),
            **self._timing(),
        }

    def _prompt_logprobs(self, prompt: int) -> list[Json | None] | None:
        """The prompt's log-probabilities in vLLM's form; ``None`` unless the request asked for
        them."""
        if self._scores is None:
            return None
        scores = [self._by_token(entry) for entry in self._scores.get(prompt, ())]
        return [None] * (self._prompt_lens[prompt] - len(scores)) + scores

    def _by_token(self, entry: TokenLogprobs) -> Json:
        ranked = [(*top, rank) for rank, top in enumerate(entry.top, 1)]
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
        }

    def stream(self, chunk: Chunk, options: StreamOptions) -> list[Json]:
        self._count(chunk)
        pieces = self._pieces(chunk)
        if pieces:
            pieces[-1]["stop_reason"] = chunk.stop_reason
            is_first = chunk.start is not None
            pieces[-1] |= self._shown_ids(chunk.index, chunk.token_ids, is_first=is_first)
        usage: Json = {}
        if options.include_usage:
            usage = {"usage": self._usage() if options.continuous_usage_stats else None}
        return [self._stream_object(choices=[piece]) | usage for piece in pieces]

    def _shown_ids(self, index: int, token_ids: Iterable[int], *, is_first: bool) -> Json:
        """A choice's token ids if they are shown, and its prompt's if ``is_first``."""
        if self._prompt_token_ids is None:
            return {}
        shown: Json = {"token_ids": list(token_ids)}
        if is_first:
            prompt = self._prompt_token_ids[index // self._num_per_prompt]
            shown["prompt_token_ids"] = prompt.tolist()
        return shown

    def _shows_ids(self, chunk: Chunk) -> bool:
        return self._prompt_token_ids is not None and len(chunk.token_ids) > 0

    def stream_end(self, options: StreamOptions) -> Sequence[Json | str]:
        told = ({"usage": self._usage()} if options.include_usage else {}) | self._timing()
        return (self._stream_object(choices=[]) | told, "[DONE]") if told else ("[DONE]",)

    def _stream_object(self, *, choices: list[Json]) -> Json:
        return {**self._header, "object": self.chunk_object, "choices": choices}

    def _timing(self) -> Json:
        if not self._tells_timing:
            return {}
        return {"timing": timing_of(timeline.current(), now_s=time.monotonic())}

    @abstractmethod
    def _whole_choice(self, index: int) -> Json: ...

    @abstractmethod
    def _pieces(self, chunk: Chunk) -> list[Json]: ...

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


class CompletionFormat(ChoicesFormat):
    """``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _whole_choice(self, index: int) -> Json:
        choice, prompt = self._choices[index], index // self._num_per_prompt
        text = "".join(choice.texts)
        if self._echo is not None:
            text = self._echoed(index) + ("" if self._echo.is_all else text)
        shown = {
            "index": index,
            "text": text,
            "logprobs": self._shown_logprobs(index) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._scores is not None:
            shown["prompt_logprobs"] = self._prompt_logprobs(prompt)
        return shown

    def _shown_logprobs(self, index: int) -> Json:
        entries = self._choices[index].logprobs
        if self._echo is None:
            return self._logprobs[index].completion(entries)
        prompt = index // self._num_per_prompt
        return self._logprobs[index].completion_with_prompt(
            [] if self._echo.is_all else entries,
            prompt=self._echo.token_ids[prompt].tolist(),
            text=self._echoed(index),
            scores=(self._scores or {}).get(prompt, ()),
        )

    def _echoed(self, index: int) -> str:
        """The prompt's text if it is shown before this choice; else ""."""
        if self._echo is None:
            return ""
        return self._echo.texts[index // self._num_per_prompt] or ""

    def _pieces(self, chunk: Chunk) -> list[Json]:
        text = chunk.text
        if self._echo is not None:
            text = "" if self._echo.is_all else text
            text = (self._echoed(chunk.index) if chunk.start is not None else "") + text
        if not (text or chunk.logprobs or chunk.finish_reason or self._shows_ids(chunk)):
            return []  # The text is held back: half a character, or perhaps a stop string.
        logprobs = None
        if self._logprobs:
            logprobs = self._logprobs[chunk.index].completion(chunk.logprobs)
        piece = {
            "index": chunk.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
        }
        return [piece]


class ChatFormat(ChoicesFormat):
    """``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self) -> Json:
        if self._scores is None:
            return super().whole()
        return super().whole() | {"prompt_logprobs": self._prompt_logprobs(0)}

    def _whole_choice(self, index: int) -> Json:
        choice = self._choices[index]
        return {
            "index": index,
            "message": self._answers[index].message("".join(choice.texts)),
            "logprobs": self._shown_logprobs(index, choice.logprobs),
            "finish_reason": self._reason(index, choice.finish_reason),
        }

    def _pieces(self, chunk: Chunk) -> list[Json]:
        pieces = []
        if chunk.start is not None:
            pieces.append(_delta(chunk.index, {"role": "assistant", "content": ""}))
        is_last = chunk.finish_reason is not None
        deltas = self._answers[chunk.index].deltas(chunk.text, is_last=is_last)
        pieces += [_delta(chunk.index, delta) for delta in deltas]
        if chunk.logprobs or is_last or self._shows_ids(chunk):
            # These go with the last piece of the chunk's text. A chunk without a piece, such as
            # (part of) a marker, gets a piece of its own.
            if not deltas:
                pieces.append(_delta(chunk.index, {}))
            pieces[-1] |= {
                "logprobs": self._shown_logprobs(chunk.index, chunk.logprobs),
                "finish_reason": self._reason(chunk.index, chunk.finish_reason),
            }
        return pieces

    def _reason(self, index: int, finish_reason: str | None) -> str | None:
        has_calls = self._answers[index].has_calls
        return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason

    def _shown_logprobs(self, index: int, entries: Iterable[TokenLogprobs]) -> Json | None:
        return self._logprobs[index].chat(entries) if self._logprobs else None


def _delta(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
