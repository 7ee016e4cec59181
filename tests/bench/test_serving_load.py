"""The load generator against a scripted server."""

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

BenchModule = Callable[[str], ModuleType]
Context = grpc.aio.ServicerContext[object, object]


class Scripted(inference_pb2_grpc.InferenceServicer):
    """Answers with the numbers after the prompt's last token, or misbehaves as the prompt says."""

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        first = request.token_ids.ids[-1]
        trouble = request.cache_salt
        for offset in range(request.sampling.max_tokens):
            if trouble == "hangs" and offset == 2:
                await asyncio.sleep(60)
            if trouble == "fails" and offset == 2:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            chunk = pb.GenerateResponse(token_offset=offset, token_ids=[first + 1 + offset])
            if offset == 0:
                chunk.start.routing.group = "a"
                chunk.start.num_cached_tokens = len(request.token_ids.ids) - 1
            if trouble == "loses" and offset == 1:
                continue
            if offset + 1 == request.sampling.max_tokens and trouble != "forgets":
                chunk.finish_reason = pb.FINISH_REASON_LENGTH
            yield chunk
            if trouble == "doubles":
                yield chunk


@pytest.fixture
def load(bench_module: BenchModule) -> ModuleType:
    return bench_module("serving.load")


def serve(use: Callable[[str], Any]) -> Any:
    """Runs ``use`` with the address of a `Scripted` server."""

    async def main() -> Any:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(Scripted(), server)  # type: ignore[abstract]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await use(f"127.0.0.1:{port}")
        finally:
            await server.stop(0)

    return asyncio.run(main())


def gateways(address: str, **options: int) -> Any:
    # `load` puts it on the path.
    return importlib.import_module("bench.serving.gateways").Gateways([address], **options)


def send(load: ModuleType, *requests: Any, limit_s: float = 600) -> Sequence[Any]:
    async def use(address: str) -> Sequence[Any]:
        async with gateways(address, num_channels=2) as cluster:
            streams: Sequence[Any] = await load.run(requests, cluster, limit_s=limit_s)
            return streams

    streams: Sequence[Any] = serve(use)
    return streams


def request(load: ModuleType, name: str, **more: Any) -> Any:
    return load.Request(**{"name": name, "token_ids": (7, 40), "max_tokens": 5, **more})


def test_every_token_has_its_time(load: ModuleType) -> None:
    begin_s = time.monotonic()
    first, second = send(load, request(load, "first"), request(load, "second", at_s=0.05))
    assert first.is_complete
    assert first.tokens == [41, 42, 43, 44, 45]
    assert first.finish == "length"
    assert (first.group, first.num_cached_tokens) == ("a", 1)
    assert first.sent_s < first.times[0] <= first.times[-1] <= first.ended_s
    assert len(first.times) == 5
    assert second.sent_s >= begin_s + 0.05 - 0.02


@pytest.mark.parametrize(
    ("trouble", "error", "tokens"),
    [
        ("loses", "token 2 came, expected 1", [41]),
        ("doubles", "token 0 came, expected 1", [41]),
        ("forgets", "the stream ended after 5 tokens, unfinished", [41, 42, 43, 44, 45]),
        ("fails", "UNAVAILABLE: gone", [41, 42]),
    ],
)
def test_what_goes_wrong_with_a_stream_is_its_error(
    load: ModuleType, trouble: str, error: str, tokens: list[int]
) -> None:
    bad, good = send(load, request(load, "bad", cache_salt=trouble), request(load, "good"))
    assert not bad.is_complete
    assert bad.error == error
    assert bad.tokens == tokens
    assert good.is_complete


@pytest.mark.slow
def test_a_stream_that_hangs_is_stopped_at_the_limit(load: ModuleType) -> None:
    (stream,) = send(load, request(load, "x", cache_salt="hangs"), limit_s=5.0)
    assert stream.error == "not finished within 5.0 s: stopped after 2 tokens"
    assert stream.tokens == [41, 42]


def test_a_deadline_is_the_servers_and_a_cancellation_is_no_error(load: ModuleType) -> None:
    late, cancelled = send(
        load,
        request(load, "late", cache_salt="hangs", deadline_s=0.5),
        request(load, "cancelled", cancel_after=3),
    )
    assert late.error is not None
    assert late.error.startswith("DEADLINE_EXCEEDED")
    assert cancelled.is_complete
    assert cancelled.finish == "cancelled"
    assert cancelled.tokens == [41, 42, 43]


def test_a_turn_follows_on_from_the_answer_before(load: ModuleType) -> None:
    turns = [load.Turn(token_ids=(100, 10), max_tokens=3), load.Turn(token_ids=(20,), max_tokens=2)]
    chats = [load.Chat(name="a", turns=turns), load.Chat(name="b", turns=turns)]

    async def use(address: str) -> Any:
        async with gateways(address) as cluster:
            return await load.run_chats(chats, cluster, num_users=1, limit_s=600)

    streams = serve(use)
    assert [stream.request.name for stream in streams] == ["a/0", "a/1", "b/0", "b/1"]
    assert streams[1].request.token_ids == (100, 10, 11, 12, 13, 20)
    assert streams[1].tokens == [21, 22]


def test_a_chat_ends_where_a_turn_fails(load: ModuleType) -> None:
    turns = [load.Turn(token_ids=(10,), max_tokens=3)] * 2
    chats = [load.Chat(name="a", turns=turns, cache_salt="fails")]

    async def use(address: str) -> Any:
        async with gateways(address) as cluster:
            return await load.run_chats(chats, cluster, num_users=3, limit_s=600)

    (stream,) = serve(use)
    assert stream.error == "UNAVAILABLE: gone"


def test_differences_name_the_first_token_that_is_not_the_references(load: ModuleType) -> None:
    def stream(name: str, tokens: list[int], finish: str) -> Any:
        made = load.Stream(request=request(load, name))
        made.tokens, made.finish = tokens, finish
        return made

    streams = [
        stream("same", [1, 2, 3], "length"),
        stream("begun", [1, 2], ""),
        stream("short", [1, 2], "length"),
        stream("other", [1, 9, 3], "length"),
        stream("unknown", [5], "length"),
    ]
    reference = {name: [1, 2, 3] for name in ("same", "begun", "short", "other")}
    assert load.differences(streams, reference) == [
        "short: 2 tokens, expected 3; they differ from token 2 on",
        "other: 3 tokens, expected 3; they differ from token 1 on",
    ]
