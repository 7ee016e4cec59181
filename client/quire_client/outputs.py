"""The results of requests: chunks of a stream, completions assembled from them, scores, vectors."""

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
    """Rank by probability; 1 is the most probable token."""
    top: tuple[tuple[int, float], ...]
    """Ids and log-probabilities of the likeliest tokens, as many as requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The data of a completion's start."""

    request_id: str
    """The completion's id, for ``quire explain``."""
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV was cached."""
    seed: int
    """The seed in use: the same request with this seed gets the same tokens."""
    group: str
    """The replica group that serves the request."""
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A completion's token counts and times."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float
    total_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of one completion in a stream."""

    index: int
    """The number of its completion, from 0 to n - 1."""
    token_offset: int
    """Number of output tokens of this completion before this chunk."""
    token_ids: tuple[int, ...]
    text: str
    """The text that these tokens complete; an incomplete character is left to a later chunk."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on a completion's last chunk, as is ``usage``."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the completion."""
    start: Start | None = None
    """Set on a completion's first chunk."""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole completion."""

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
    """The embedding vector of one input."""

    values: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A document's index among those sent, and its similarity to the query."""

    index: int
    score: float


def embeddings_of(response: pb.EmbedResponse) -> list[Embedding]:
    """Converts a message to embeddings."""
    return [
        Embedding(
            values=tuple(each.values),
            num_prompt_tokens=each.num_prompt_tokens,
            num_cached_tokens=each.num_cached_tokens,
        )
        for each in response.embeddings
    ]


def ranked_of(response: pb.RankResponse) -> list[Ranked]:
    """Converts a message to ranked documents, best first."""
    return [Ranked(index=each.index, score=each.score) for each in response.ranked]


def chunk_of(response: pb.GenerateResponse) -> Chunk:
    """Converts a message to a chunk."""
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
    """Assembles all chunks of a request into its completions, by index."""
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
