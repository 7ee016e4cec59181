"""The body of a request, and the timing and token counts of its streamed answer.

A chunk's tokens are counted by the usage in it if the server reports usage in every chunk
(``continuous_usage_stats``, requested if the server accepts it). Otherwise a chunk with text counts
as one token, and only the total is exact, from the usage at the end.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cluster.tools.bench.serving.dataset import Prompt
from quire.worker.request.errors import ConfigError

_LONGEST_LINE = 1 << 20
_MOST_TOKENS = 100_000
"""Most tokens of one chunk; a larger count from a server is not believed."""
_PROBE_TOKENS = 8
_LONGEST_MESSAGE = 300
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


NO_TOKEN = "no token"
"""The kind of an answer that ended properly but had no tokens."""


class RequestFailed(Exception):
    """A request without an answer, or with an incomplete one. Equal failures have the same
    ``kind``."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(_shown(message or kind))
        self.kind = _shown(kind)


@dataclass(frozen=True, slots=True)
class Form:
    """The form of requests that a server accepts."""

    ids: bool
    """Whether prompts are token ids."""
    usage: str
    """How the server reports usage: "continuous" (in every chunk), "end" or "none"."""


def forms(prompts: Sequence[Prompt], *, is_chat: bool) -> list[Form]:
    """The forms to try, the best first.

    Raises:
        ConfigError: A file has token ids, which a chat cannot send, or messages, which only a
            chat can send.
    """
    if not is_chat and any(isinstance(prompt.content, list) for prompt in prompts):
        raise ConfigError("the dataset has messages: give --backend openai-chat")
    of_ids = [prompt for prompt in prompts if isinstance(prompt.content, np.ndarray)]
    must_be_ids = any(not prompt.is_made_up for prompt in of_ids)
    if must_be_ids and is_chat:
        raise ConfigError("the dataset has token ids: give --endpoint /v1/completions")
    as_ids = [True] if must_be_ids else [False]
    if of_ids and not must_be_ids and not is_chat:
        as_ids = [True, False]
    return [Form(ids, usage) for ids in as_ids for usage in ("continuous", "end", "none")]


def probe_of(prompts: Sequence[Prompt]) -> Prompt:
    """A short prompt of the same kind that no cache can confuse with ``prompts``: it repeats the
    greatest of their token ids, if they have any."""
    ids = [prompt.content for prompt in prompts if isinstance(prompt.content, np.ndarray)]
    if ids:
        greatest = max(int(each.max()) for each in ids)
        return Prompt(content=np.full(_PROBE_TOKENS, greatest), max_tokens=1, is_made_up=True)
    if isinstance(prompts[0].content, list):
        return Prompt(content=[{"role": "user", "content": "Hello"}], max_tokens=1)
    return Prompt(content="Hello", max_tokens=1)


def encode(
    prompt: Prompt, form: Form, *, model: str, is_chat: bool, more: Mapping[str, Any]
) -> bytes:
    """The body of a prompt's request. ``more``: extra fields, which override the others."""
    content = prompt.content
    body: dict[str, Any] = {"model": model}
    if is_chat:
        is_talk = isinstance(content, list)
        body["messages"] = content if is_talk else [{"role": "user", "content": prompt.text}]
    elif form.ids and isinstance(content, np.ndarray):
        body["prompt"] = content.tolist()
    else:
        body["prompt"] = prompt.text
    body |= {"max_tokens": prompt.max_tokens, "stream": True}
    if form.usage != "none":
        body["stream_options"] = {"include_usage": True}
        if form.usage == "continuous":
            body["stream_options"]["continuous_usage_stats"] = True
    return json.dumps(body | dict(more)).encode()


@dataclass(kw_only=True, slots=True)
class Answer:
    """The timing and content of one answer. Times are in seconds of the load's clock; 0.0 if not
    reached."""

    due_s: float = 0.0
    started_s: float = 0.0
    """When the client started on it."""
    sent_s: float = 0.0
    """Later than ``started_s`` if the client was at its limit of concurrent requests."""
    ended_s: float = 0.0
    """When the last chunk arrived."""
    times: "array[float]" = field(default_factory=lambda: array("d"))
    """Arrival time of each chunk with tokens."""
    counts: "array[int]" = field(default_factory=lambda: array("I"))
    """Number of tokens of each of these chunks."""
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    """Prompt tokens that the server had cached, if it reports them."""
    is_counted: bool | None = None
    """Whether ``counts`` come from the server."""
    keeps_text: bool = False
    text: list[str] = field(default_factory=list)
    failure: RequestFailed | None = None
    _rest: bytes = b""
    _is_over: bool = False

    @property
    def is_complete(self) -> bool:
        return self.failure is None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the answer; counted from chunks if the server does not report it."""
        return sum(self.counts) if self.num_output is None else self.num_output

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def queued_s(self) -> float:
        """How long the client held it back, in seconds."""
        return self.sent_s - self.started_s

    @property
    def itls_s(self) -> NDArray[np.float64]:
        """The gap before each token except the first, in seconds. Tokens of one chunk share the gap
        before it evenly; tokens in the first one's chunk have none."""
        counts = np.array(self.counts, dtype=np.int64)
        shares = np.diff(self.times) / counts[1:]
        return np.concatenate([np.zeros(counts[0] - 1), np.repeat(shares, counts[1:])])

    def feed(self, data: bytes, now_s: float) -> None:
        """Processes the next bytes of the stream.

        Raises:
            RequestFailed: The stream reports an error, or is not a stream of chunks.
        """
        if b"\n" not in data:
            self._rest += data
        else:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now_s)
        if len(self._rest) > _LONGEST_LINE:
            raise RequestFailed("no stream of events", f"a line of over {_LONGEST_LINE:,} bytes")

    def close(self) -> None:
        """Processes the end of the stream.

        Raises:
            RequestFailed: The stream ended too early.
        """
        if not self._is_over:
            raise RequestFailed("cut off", f"the stream ended after {self.num_tokens} tokens")
        if not self.times:
            raise RequestFailed(NO_TOKEN, "the stream ended without a token")

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self._is_over = True
            return
        try:
            event = json.loads(payload)
            if error := event.get("error"):
                kind = error.get("type") or error.get("code") if isinstance(error, dict) else None
                raise RequestFailed(f"error in the stream: {kind or 'unnamed'}", str(error))
            self._chunk(event, now_s)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            shown = payload[:200].decode(errors="replace")
            raise RequestFailed("no chunk of a completion", shown) from None

    def _chunk(self, event: dict[str, Any], now_s: float) -> None:
        usage = event.get("usage") or {}
        total = usage.get("completion_tokens")
        for choice in (event.get("choices") or ())[:1]:
            self.ended_s = now_s
            self._is_over = self._is_over or choice.get("finish_reason") is not None
            text = _text(choice)
            if self.is_counted is None and (text or total):
                self.is_counted = total is not None
            if self.is_counted:
                # A chunk without a count, such as some servers' last one, has no tokens.
                count = 0 if total is None else total - (self.num_output or 0)
            else:
                count = 1 if text else 0
            if count > _MOST_TOKENS:
                raise ValueError
            if count > 0:
                self.times.append(now_s)
                self.counts.append(count)
            if self.keeps_text:
                self.text.append(text)
        if total is not None:
            self.num_output = int(total)
        if usage.get("prompt_tokens") is not None:
            self.num_prompt = int(usage["prompt_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            self.num_cached = int(cached)


def _shown(text: str) -> str:
    """A server's text as one line that cannot harm a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_MESSAGE])


def _text(choice: dict[str, Any]) -> str:
    """The text that a chunk adds; tool calls as JSON."""
    if text := choice.get("text"):
        return str(text)
    delta = choice.get("delta") or {}
    texts = [str(delta[name]) for name in _TEXTS if delta.get(name)]
    if calls := delta.get("tool_calls"):
        texts.append(json.dumps(calls))
    return texts[0] if texts else ""
