"""The load of `bench.rolling`: closed loops of streams of known tokens, over gRPC and HTTP."""

import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from quire.cluster.client import generate
from quire.v1 import inference_pb2 as pb

PROMPTS = ["A whale is", "What is a harbor?", "Once upon a time", "Paged attention is"]
_TIMEOUT_S = 300.0


class Failed(Exception):
    """A stream ended with an error, which the message tells."""


@dataclass(frozen=True)
class Ask:
    prompt: str
    seed: int
    """0 is greedy."""
    max_tokens: int


class Client(Protocol):
    """One user, who has one stream at a time."""

    def stream(self, ask: Ask) -> Iterator[tuple[Sequence[int], bool]]:
        """Tokens as they come, each time with whether these were the last. Raises Failed."""

    def close(self) -> None: ...


@dataclass
class Load:
    """Closed loops of streams, and what became of them."""

    grpc: str
    http: str
    max_tokens: int
    expected: dict[Ask, list[list[int]]] = field(default_factory=dict)
    """The right answers: one for each numerics that was asked."""
    answers: list[tuple[str, Ask, list[int]]] = field(default_factory=list)
    """The client, the request and the tokens of each stream that finished."""
    broken: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def learn(self, num_seeds: int) -> None:
        """Asks for every answer once, alone. May be called again where numerics changed."""
        client = _OverGrpc(self.grpc)
        for prompt, seed in itertools.product(PROMPTS, range(num_seeds)):
            ask = Ask(prompt, seed, self.max_tokens)
            answer = [id for ids, _ in client.stream(ask) for id in ids]
            self.expected.setdefault(ask, []).append(answer)
        client.close()

    def run(self, number: int) -> None:
        """The user of that number, until the `end`."""
        name, is_kept = ("gRPC", "HTTP")[number % 2], number // 2 % 2 == 0
        client: Client | None = None
        for turn in itertools.count():
            if self._ended.is_set():
                break
            if client is None:
                client = _OverHttp(self.http) if name == "HTTP" else _OverGrpc(self.grpc)
            prompt = PROMPTS[(number + turn) % len(PROMPTS)]
            ask = Ask(prompt, number // 4 % 2 * (1 + turn % 2), self.max_tokens)
            is_finished = self._stream(f"{name}, {'kept' if is_kept else 'new'}", client, ask)
            if not (is_kept and is_finished):
                client.close()
                client = None
        if client is not None:
            client.close()

    def end(self) -> None:
        self._ended.set()

    def _stream(self, name: str, client: Client, ask: Ask) -> bool:
        token_ids: list[int] = []
        is_finished, error, gap_s, last_s = False, "no finish reason", 0.0, None
        try:
            for ids, is_last in client.stream(ask):
                now_s = time.monotonic()
                gap_s = max(gap_s, now_s - (now_s if last_s is None else last_s))
                last_s = now_s
                token_ids += ids
                is_finished |= is_last
        except Failed as failure:
            is_finished, error = False, str(failure)
        with self._lock:
            self.gaps_s.append(gap_s)
            if is_finished:
                self.answers.append((name, ask, token_ids))
            else:
                (self.broken if token_ids else self.refused).append(f"{name}: {error}")
        if not is_finished:
            time.sleep(0.2)
        return is_finished

    def figures(self) -> dict[str, Any]:
        exact = Counter(name for name, ask, ids in self.answers if ids in self.expected[ask])
        inexact = [
            f"{name}: {ask.prompt!r}, seed {ask.seed}"
            for name, ask, ids in self.answers
            if ids not in self.expected[ask]
        ]
        return {
            "complete": exact.total(),
            "complete_by_client": dict(exact),
            "broken": len(self.broken),
            "refused": len(self.refused),
            "inexact": len(inexact),
            "largest_gap_s": round(max(self.gaps_s, default=0.0), 2),
            "errors": Counter([*self.broken, *self.refused, *inexact]).most_common(8),
        }


class _OverGrpc:
    def __init__(self, address: str) -> None:
        self._channel = own_channel(address)

    def stream(self, ask: Ask) -> Iterator[tuple[Sequence[int], bool]]:
        sampling = pb.SamplingParams(
            temperature=0.9 if ask.seed else 0,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
        )
        num_tokens = 0
        try:
            for chunk in generate(
                self._channel, pb.GenerateRequest(text=ask.prompt, sampling=sampling)
            ):
                if chunk.token_offset != num_tokens:
                    raise Failed(f"token {chunk.token_offset} where {num_tokens} was due")
                num_tokens += len(chunk.token_ids)
                yield chunk.token_ids, bool(chunk.finish_reason)
        except grpc.RpcError as failure:
            raise Failed(f"{failure.code().name}: {failure.details()}") from failure

    def close(self) -> None:
        self._channel.close()


class _OverHttp:
    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)

    def stream(self, ask: Ask) -> Iterator[tuple[Sequence[int], bool]]:
        body = {
            "prompt": ask.prompt,
            "temperature": 0.9 if ask.seed else 0,
            "seed": ask.seed,
            "max_tokens": ask.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        head = {"Content-Type": "application/json"}
        is_done = False
        try:
            # It connects again where the last answer said that its connection ends.
            self._connection.request("POST", "/v1/completions", json.dumps(body), head)
            response = self._connection.getresponse()
            if response.status != 200:
                raise Failed(f"{response.status}: {response.read().decode()}")
            while line := response.readline():
                event = line.removeprefix(b"data: ").strip()
                if event == b"[DONE]":
                    is_done = True
                elif event:
                    (choice,) = json.loads(event)["choices"]
                    yield choice["token_ids"], choice["finish_reason"] is not None
        except (OSError, http.client.HTTPException, KeyError) as failure:
            raise Failed(repr(failure)) from failure
        if not is_done:
            raise Failed("no [DONE]")

    def close(self) -> None:
        self._connection.close()


def own_channel(address: str) -> grpc.Channel:
    """One with a connection of its own, so that gateways on one port share the streams."""
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
