"""Load on a cluster: many streams at once, of which nothing is forgotten.

    async with Gateways([endpoints.grpc], num_channels=4) as cluster:    # bench.serving.gateways
        streams = await run(requests, cluster, limit_s=60)    # open loop: each at its own time
        streams = await run_chats(chats, cluster, num_users=8, limit_s=60)    # closed loop
    print(differences(streams, reference))

Sending never raises: what went wrong with a stream is its ``error``. A stream without one has a
finish, and its tokens follow on from each other, none lost and none twice. Times are seconds on
`time.monotonic`, so that what others record in this process (a kill, a cut) can be laid beside.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to ask for. It goes on past the end token unless ``may_stop``."""

    name: str
    """Identifies the request in comparisons of runs; unique within a run."""
    token_ids: Sequence[int] = ()
    text: str = ""
    """The prompt as text, in place of token ids."""
    max_tokens: int
    at_s: float = 0.0
    """Seconds from the begin of the run until the request is sent."""
    temperature: float = 0.0
    seed: int = 0
    cache_salt: str = ""
    may_stop: bool = False
    deadline_s: float | None = None
    """The gRPC deadline of the call, in seconds."""
    cancel_after: int | None = None
    """The client cancels after this number of tokens; the stream's finish is "cancelled"."""
    model: str = ""
    """The name of a model or adapter; empty for the only model."""
    form: Mapping[str, str] = field(default_factory=dict)
    """The constraint of the output: its kind and its text."""


@dataclass(kw_only=True, slots=True, eq=False)
class Stream:
    """The result of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    error: str | None = None
    """``CODE: details`` of the call, or what was wrong with its chunks."""
    finish: str = ""
    """"stop", "length", "abort" or "cancelled"; empty if it never ended properly."""
    sent_s: float = 0.0
    ended_s: float = 0.0
    group: str = ""
    """The first group that ran the request."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache of ``group``."""
    num_predicted_tokens: int = 0
    """Prompt tokens that the gateway expected in the cache of ``group``."""

    @property
    def is_complete(self) -> bool:
        return self.error is None and bool(self.finish)

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] - self.sent_s if self.times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens, after the first."""
        if len(self.times) < 2:
            return None
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def largest_gap_s(self) -> float:
        """The longest time between two tokens, in seconds."""
        return max((b - a for a, b in pairwise(self.times)), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A user's message, and the length of the answer."""

    token_ids: Sequence[int]
    max_tokens: int
    think_s: float = 0.0
    """Seconds between the previous turn's answer and this message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """Each prompt is all that was said before, answers included, and the turn's own tokens."""

    name: str
    turns: Sequence[Turn]
    cache_salt: str = ""


class Target(Protocol):
    """The server that requests are sent to."""

    async def send(self, stream: Stream) -> None:
        """Asks for ``stream.request`` and fills the stream in until it ends. Never raises, but
        when it is cancelled."""


async def run(requests: Iterable[Request], target: Target, *, limit_s: float) -> list[Stream]:
    """Sends each request at its time, whatever became of those before it.

    Streams that have not ended ``limit_s`` after the begin are cancelled and say so. The result
    is in the order of ``requests``.
    """
    streams = [Stream(request=request) for request in requests]
    begin_s = time.monotonic()

    async def one(stream: Stream) -> None:
        await _sleep_until(begin_s + stream.request.at_s)
        await target.send(stream)

    await _within(limit_s, [one(stream) for stream in streams])
    return [_ended(stream, limit_s) for stream in streams]


async def run_chats(
    chats: Iterable[Chat],
    target: Target,
    *,
    num_users: int,
    limit_s: float,
    on_stream: Callable[[Stream], None] = lambda stream: None,
) -> list[Stream]:
    """``num_users`` at a time hold one chat after another, taken from ``chats`` in order.

    A chat ends early where a turn fails. Requests are named ``chat/number of the turn``.
    ``on_stream`` is called when a stream has ended. The result is in the order of sending.
    """
    streams: list[Stream] = []
    left = iter(chats)

    async def user() -> None:
        for chat in left:
            said: list[int] = []
            for number, turn in enumerate(chat.turns):
                await asyncio.sleep(turn.think_s)
                said += turn.token_ids
                stream = Stream(
                    request=Request(
                        name=f"{chat.name}/{number}",
                        token_ids=tuple(said),
                        max_tokens=turn.max_tokens,
                        cache_salt=chat.cache_salt,
                    )
                )
                streams.append(stream)
                await target.send(stream)
                on_stream(stream)
                if not stream.is_complete:
                    break
                said += stream.tokens

    await _within(limit_s, [user() for _ in range(num_users)])
    return [_ended(stream, limit_s) for stream in streams]


def differences(streams: Iterable[Stream], reference: Mapping[str, Sequence[int]]) -> list[str]:
    """A line for each stream whose tokens are not those of ``reference``, by request's name.

    Where a stream did not run to its end, the tokens that came are compared. Requests that the
    reference lacks are passed over.
    """
    lines = []
    for stream in streams:
        name, tokens = stream.request.name, stream.tokens
        if name not in reference:
            continue
        expected = list(reference[name])
        if not stream.is_complete or stream.finish == "cancelled":
            expected = expected[: len(tokens)]
        if tokens != expected:
            same = sum(1 for _ in _common(tokens, expected))
            lines.append(
                f"{name}: {len(tokens)} tokens, expected {len(expected)}; they differ from token "
                f"{same} on"
            )
    return lines


def _common(tokens: Sequence[int], expected: Sequence[int]) -> Iterable[int]:
    for ours, theirs in zip(tokens, expected, strict=False):
        if ours != theirs:
            return
        yield ours


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(at_s - time.monotonic(), 0))


async def _within(limit_s: float, jobs: Sequence[Coroutine[None, None, None]]) -> None:
    """Runs them all, and cancels those that are not done in time."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
    finally:
        late = [task for task in tasks if not task.done()]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    for task in tasks:
        if task not in late:
            task.result()  # Only bugs of the load generator raise here.


def _ended(stream: Stream, limit_s: float) -> Stream:
    if stream.error is None and not stream.finish:
        sent = f"{len(stream.tokens)} tokens" if stream.sent_s else "before it was sent"
        stream.error = f"not finished within {limit_s} s: stopped after {sent}"
    return stream
