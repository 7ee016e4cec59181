"""Generated chunks in the words of OpenAI's API: choices, deltas, log-probabilities, usage.

A `Format` lives as long as one HTTP request. It is fed the chunks of all its choices in the order
in which they come, and gives either the pieces of a stream or, at the end, the whole answer.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import inference_pb2 as pb
from quire.worker.text.tokenizer import Tokenizer

Json = dict[str, Any]

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    text_offset: int = 0
    finish_reason: str | None = None


class Format(ABC):
    """Base of both endpoints: counts usage and builds answers.

    ``num_per_prompt`` choices belong to each prompt; a prompt's tokens count once.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        *,
        reply_id: str,
        model: str,
        num_choices: int,
        num_per_prompt: int,
        logprobs: bool,
        tokenizer: Tokenizer,
    ) -> None:
        self._header = {"id": reply_id, "created": int(time.time()), "model": model}
        self._num_per_prompt = num_per_prompt
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(num_choices)]
        self._num_prompt = self._num_cached = self._num_output = 0

    def take(self, chunk: pb.GenerateResponse) -> None:
        """Adds a chunk to the whole answer."""
        self._count(chunk)
        choice = self._choices[chunk.index]
        choice.texts.append(chunk.text)
        choice.logprobs.extend(chunk.logprobs)
        choice.finish_reason = _finish_reason(chunk)

    @property
    def num_steps(self) -> int:
        """How much work `whole` is, roughly: with log-probabilities, up to 21 tokens for each are
        decoded one by one."""
        return self._num_output * (100 if self._logprobs else 1)

    def whole(self) -> Json:
        """The answer to a request that does not stream."""
        choices = [self._whole_choice(index) for index in range(len(self._choices))]
        return {
            **self._header,
            "object": self.whole_object,
            "choices": choices,
            "usage": self._usage(),
        }

    def stream(self, chunk: pb.GenerateResponse, *, include_usage: bool) -> list[Json]:
        """The stream's event for one chunk; none if the chunk holds no text yet."""
        self._count(chunk)
        pieces = self._pieces(chunk)
        usage: Json = {"usage": None} if include_usage else {}
        return [self._stream_object(choices=[piece]) | usage for piece in pieces]

    def stream_usage(self) -> Json:
        """The last piece of a stream that asked for usage."""
        return self._stream_object(choices=[]) | {"usage": self._usage()}

    def _stream_object(self, *, choices: list[Json]) -> Json:
        return {**self._header, "object": self.chunk_object, "choices": choices}

    @abstractmethod
    def _whole_choice(self, index: int) -> Json: ...

    @abstractmethod
    def _pieces(self, chunk: pb.GenerateResponse) -> list[Json]: ...

    def _count(self, chunk: pb.GenerateResponse) -> None:
        self._num_output += len(chunk.token_ids)
        if chunk.HasField("start") and chunk.index % self._num_per_prompt == 0:
            self._num_prompt += chunk.start.num_prompt_tokens
            self._num_cached += chunk.start.num_cached_tokens

    def _usage(self) -> Json:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


class CompletionFormat(Format):
    """``/v1/completions``."""

    whole_object = chunk_object = "text_completion"

    def _whole_choice(self, index: int) -> Json:
        choice = self._choices[index]
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": self._render_logprobs(choice, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _pieces(self, chunk: pb.GenerateResponse) -> list[Json]:
        if _says_nothing(chunk):
            return []
        logprobs = self._render_logprobs(self._choices[chunk.index], chunk.logprobs)
        piece = {
            "index": chunk.index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": _finish_reason(chunk),
        }
        return [piece]

    def _render_logprobs(self, choice: _Choice, entries: Iterable[pb.TokenLogprobs]) -> Json | None:
        if not self._logprobs:
            return None
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            text = self._tokenizer.token_text(entry.token_id)
            # The chosen token is listed even where it is not among the most probable.
            top = {self._tokenizer.token_text(top.token_id): top.logprob for top in entry.top}
            shown["tokens"].append(text)
            shown["token_logprobs"].append(entry.logprob)
            shown["top_logprobs"].append(top | {text: entry.logprob})
            shown["text_offset"].append(choice.text_offset)
            choice.text_offset += len(text)
        return shown


class ChatFormat(Format):
    """``/v1/chat/completions``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _whole_choice(self, index: int) -> Json:
        choice = self._choices[index]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": self._render_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _pieces(self, chunk: pb.GenerateResponse) -> list[Json]:
        pieces = []
        if chunk.HasField("start"):
            pieces.append(_delta(chunk.index, {"role": "assistant", "content": ""}))
        if not _says_nothing(chunk):
            delta = {"content": chunk.text} if chunk.text else {}
            logprobs = self._render_logprobs(chunk.logprobs)
            pieces.append(_delta(chunk.index, delta, logprobs, _finish_reason(chunk)))
        return pieces

    def _render_logprobs(self, entries: Iterable[pb.TokenLogprobs]) -> Json | None:
        if not self._logprobs:
            return None
        content = []
        for entry in entries:
            top = [self._render_token(top.token_id, top.logprob) for top in entry.top]
            content.append(
                self._render_token(entry.token_id, entry.logprob) | {"top_logprobs": top}
            )
        return {"content": content, "refusal": None}

    def _render_token(self, token_id: int, logprob: float) -> Json:
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _delta(
    index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _says_nothing(chunk: pb.GenerateResponse) -> bool:
    """A chunk whose text is held back yet: half a character, or perhaps a stop string."""
    return not (chunk.text or chunk.logprobs or chunk.finish_reason)


def _finish_reason(chunk: pb.GenerateResponse) -> str | None:
    return _FINISH_REASONS.get(chunk.finish_reason)
