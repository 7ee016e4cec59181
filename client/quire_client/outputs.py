"""What a client gets: chunks as they come, and completions put together of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from quire_client import inference_pb2 as pb

FinishReason = Literal["stop", "length", "abort"]

_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's score."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: tuple[tuple[int, float], ...]
    """Id and log probability of the likeliest tokens, as many as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known of a completion when it begins."""

    request_id: str
    """The completion's name, for ``quire explain``."""
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the cache."""
    seed: int
    """The seed in force: the same request with it gets the same tokens."""
    group: str
    """The replica group that serves the request."""
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a completion cost."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float
    total_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of one completion, as it came."""

    index: int
    """Which of the n completions it belongs to."""
    token_offset: int
    """Output tokens of this completion before this chunk."""
    token_ids: tuple[int, ...]
    text: str
    """What these tokens complete; shorter than they are where a character is unfinished."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on a completion's last chunk, as is ``usage``."""
    stop_reason: str | int | None = None
    """The request's stop string, or stop token, that ended it."""
    start: Start | None = None
    """Set on a completion's first chunk."""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One whole completion."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    start: Start
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The vector of one input."""

    values: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document's place among those that were sent, and how alike it is to the query."""

    index: int
    score: float


def embeddings_of(response: pb.EmbedResponse) -> list[Embedding]:
    """The embeddings in a message."""
    return [
        Embedding(
            values=tuple(each.values),
            num_prompt_tokens=each.num_prompt_tokens,
            num_cached_tokens=each.num_cached_tokens,
        )
        for each in response.embeddings
    ]


def ranked_of(response: pb.RankResponse) -> list[Ranked]:
    """The documents in a message, best first."""
    return [Ranked(index=each.index, score=each.score) for each in response.ranked]


def chunk_of(response: pb.GenerateResponse) -> Chunk:
    """The chunk in a message."""
    stop = response.WhichOneof("stop_reason")
    return Chunk(
        index=response.index,
        token_offset=response.token_offset,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=_scores(response.logprobs),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        stop_reason=None if stop is None else getattr(response, stop),
        start=_start(response.start) if response.HasField("start") else None,
        usage=_usage(response.usage) if response.HasField("usage") else None,
    )


def completions_of(chunks: Iterable[Chunk]) -> list[Completion]:
    """The completions that all chunks of a request make, by index."""
    parts: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.index, []).append(chunk)
    return [_joined(parts[index]) for index in sorted(parts)]


def _joined(chunks: Sequence[Chunk]) -> Completion:
    first, last = chunks[0], chunks[-1]
    if first.start is None or last.finish_reason is None or last.usage is None:
        raise ValueError(f"completion {first.index} has no beginning, or no end")
    return Completion(
        index=first.index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(score for chunk in chunks for score in chunk.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        start=first.start,
        usage=last.usage,
    )


def _start(start: pb.Start) -> Start:
    return Start(
        request_id=start.request_id,
        model=start.model,
        num_prompt_tokens=start.num_prompt_tokens,
        num_cached_tokens=start.num_cached_tokens,
        seed=start.seed,
        group=start.routing.group,
        prompt_logprobs=_scores(start.prompt_logprobs),
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_output_tokens=usage.num_output_tokens,
        time_to_first_token_s=usage.time_to_first_token_s,
        total_time_s=usage.total_time_s,
    )


def _scores(scores: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            score.token_id,
            score.logprob,
            score.rank,
            tuple((top.token_id, top.logprob) for top in score.top),
        )
        for score in scores
    )
