import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio


def request(prompt: str | Sequence[int], *, model: str = "", **sampling: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(model=model, sampling=pb.SamplingParams(**sampling))
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


async def collect(call: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    return [chunk async for chunk in call]


def tokens(chunks: Sequence[pb.GenerateResponse], *, index: int = 0) -> list[int]:
    """One completion's tokens; its chunks must follow on from each other."""
    found: list[int] = []
    for chunk in chunks:
        if chunk.index == index:
            assert chunk.token_offset == len(found)
            found.extend(chunk.token_ids)
    return found


def text(chunks: Sequence[pb.GenerateResponse]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def test_a_request_gets_the_tokens_and_text_of_the_model(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        prompt = cluster.model.tokenizer.encode("the cat sat")
        chunks = await collect(
            cluster.inference.Generate(
                request("the cat sat", seed=7, max_tokens=30, ignore_eos=True)
            )
        )
    expected = cluster.model.continuation(prompt, seed=7, max_tokens=30)
    assert tokens(chunks) == expected
    assert text(chunks) == cluster.model.tokenizer.decode(expected)
    assert chunks[0].start.model == "hash"
    assert chunks[0].start.seed == 7
    assert chunks[0].start.num_prompt_tokens == len(prompt)
    assert not any(chunk.HasField("start") for chunk in chunks[1:])
    assert chunks[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert chunks[-1].usage.num_output_tokens == 30
    assert 0 < chunks[-1].usage.time_to_first_token_s <= chunks[-1].usage.total_time_s


async def test_the_end_token_ends_a_request_and_is_not_part_of_its_text(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        prompt = cluster.model.tokenizer.encode("the end")
        seed = next(
            seed
            for seed in range(1000)
            if len(cluster.model.continuation(prompt, seed=seed, max_tokens=50, ignore_eos=False))
            < 20
        )
        chunks = await collect(
            cluster.inference.Generate(request("the end", seed=seed, max_tokens=50))
        )
    expected = cluster.model.continuation(prompt, seed=seed, max_tokens=50, ignore_eos=False)
    assert tokens(chunks) == expected
    assert text(chunks) == cluster.model.tokenizer.decode(expected[:-1])
    assert chunks[-1].finish_reason == pb.FINISH_REASON_STOP


async def test_a_stop_string_ends_text_and_tokens_and_the_groups_work(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        prompt = cluster.model.tokenizer.encode("stop here")
        expected = cluster.model.continuation(prompt, seed=3, max_tokens=300)
        whole = cluster.model.tokenizer.decode(expected)
        stop = whole[20:23]
        chunks = await collect(
            cluster.inference.Generate(
                request("stop here", seed=3, max_tokens=300, ignore_eos=True, stop=[stop])
            )
        )
        await cluster.groups["g0"].settle()
        assert cluster.groups["g0"].engine_loop.num_requests == 0
    assert text(chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == pb.FINISH_REASON_STOP
    given = tokens(chunks)
    assert given == expected[: len(given)]
    shown = cluster.model.tokenizer.decode(given)
    assert shown.endswith(stop), "no token behind the one that completes the stop string"


async def test_completions_of_one_prompt_use_consecutive_seeds(start_cluster: Any) -> None:
    async with start_cluster() as cluster:
        prompt = [20, 21, 22, 23, 24, 25]
        chunks = await collect(
            cluster.inference.Generate(
                request(prompt, n=3, seed=2**63 - 2, max_tokens=12, ignore_eos=True)
            )
        )
    for index, seed in enumerate((2**63 - 2, 2**63 - 1, 0)):
        expected = cluster.model.continuation(prompt, seed=seed, max_tokens=12)
        assert tokens(chunks, index=index) == expected


async def test_a_seed_is_chosen_and_told_where_the_client_gives_none(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        prompt = [30, 31, 32]
        first = await collect(cluster.inference.Generate(request(prompt, ignore_eos=True)))
        other = await collect(cluster.inference.Generate(request(prompt, ignore_eos=True)))
    seed = first[0].start.seed
    assert seed != other[0].start.seed
    assert tokens(first) == cluster.model.continuation(prompt, seed=seed, max_tokens=16)


async def test_logprobs_come_with_each_token(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        chunks = await collect(
            cluster.inference.Generate(request([9, 8], logprobs=2, max_tokens=5, ignore_eos=True))
        )
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.token_id for entry in logprobs] == tokens(chunks)
    assert all(len(entry.top) == 2 and entry.rank == 1 for entry in logprobs)


async def test_a_chat_is_rendered_with_the_models_template(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="the mat")])
        chunks = await collect(
            cluster.inference.Generate(
                pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(seed=1, ignore_eos=True))
            )
        )
        tokenized = await cluster.inference.Tokenize(pb.TokenizeRequest(chat=chat))
    prompt = cluster.model.tokenizer.encode("<|user|>the mat<|end|><|assistant|>")
    assert list(tokenized.token_ids) == prompt
    assert tokens(chunks) == cluster.model.continuation(prompt, seed=1, max_tokens=16)


async def test_a_chat_carries_all_that_its_template_may_ask_for(start_cluster: Any) -> None:
    turns = [pb.ChatMessage(role="user", content="the mat")]
    start = "<|user|>the mat"
    tool = {"type": "function", "function": {"name": "f"}}
    async with start_cluster(num_groups=1) as cluster:
        for chat, rendered in (
            (pb.Chat(messages=turns, continue_final_message=True), start),
            (pb.Chat(messages=turns, no_generation_prompt=True), f"{start}<|end|>"),
            (
                pb.Chat(messages=turns, template_kwargs_json='{"unknown": 1}'),
                f"{start}<|end|><|assistant|>",
            ),
            (
                pb.Chat(messages=turns, tools_json=json.dumps([tool])),
                f"<|system|>{json.dumps([tool])}<|end|>{start}<|end|><|assistant|>",
            ),
            (
                pb.Chat(
                    messages=[
                        pb.ChatMessage(role="tool", content="5", fields_json='{"tool_call_id":"7"}')
                    ]
                ),
                "<|tool|>57<|end|><|assistant|>",
            ),
        ):
            tokenized = await cluster.inference.Tokenize(pb.TokenizeRequest(chat=chat))
            assert list(tokenized.token_ids) == cluster.model.tokenizer.encode(rendered)
        for bad, words in (
            ("[]", "must be a JSON object"),
            ("{", "is not JSON"),
            (" " * 2**17, "at"),
        ):
            for chat in (
                pb.Chat(messages=turns, template_kwargs_json=bad),
                pb.Chat(messages=[pb.ChatMessage(role="user", fields_json=bad)]),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await cluster.inference.Tokenize(pb.TokenizeRequest(chat=chat))
                assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert words in str(raised.value.details())
        with pytest.raises(grpc.aio.AioRpcError, match="must be a list"):
            await cluster.inference.Tokenize(
                pb.TokenizeRequest(chat=pb.Chat(messages=turns, tools_json="{}"))
            )


async def test_what_ended_an_answer_is_said(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        expected = cluster.model.continuation([9, 8], seed=1, max_tokens=20)
        by_id = request([9, 8], seed=1, ignore_eos=True, stop_token_ids=[expected[3]])
        chunks = await collect(cluster.inference.Generate(by_id))
        assert chunks[-1].stop_token_id == expected[3]
        chunks = await collect(cluster.inference.Generate(request([9, 8], seed=1, max_tokens=2)))
        assert chunks[-1].WhichOneof("stop_reason") is None


async def test_tokens_and_text_convert_both_ways(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        tokenized = await cluster.inference.Tokenize(pb.TokenizeRequest(text="the cat über"))
        detokenized = await cluster.inference.Detokenize(
            pb.DetokenizeRequest(token_ids=tokenized.token_ids)
        )
    assert detokenized.text == "the cat über"
    assert tokenized.max_model_len == 400


BAD_REQUESTS: list[tuple[pb.GenerateRequest, str, list[str]]] = [
    (request([]), "INVALID_ARGUMENT", ["prompt is empty"]),
    (pb.GenerateRequest(), "INVALID_ARGUMENT", ["prompt is missing"]),
    (request([5, 100_000]), "INVALID_ARGUMENT", ["100000", "position 1"]),
    (
        request([5] * 300, max_tokens=150),
        "INVALID_ARGUMENT",
        ["300 tokens", "max_tokens=150", "450", "400"],
    ),
    (request([5] * 400), "INVALID_ARGUMENT", ["400", "399"]),
    (request([5], temperature=-1), "INVALID_ARGUMENT", ["temperature=-1.0"]),
    (request([5], seed=2**64 - 1), "INVALID_ARGUMENT", ["seed", "2**63"]),
    (request([5], stop_token_ids=[9999]), "INVALID_ARGUMENT", ["9999", "stop_token_ids"]),
    (request([5], model="other"), "NOT_FOUND", ["'other'", "'hash'"]),
]


async def test_bad_requests_are_refused_with_code_and_numbers(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        for bad, code, words in BAD_REQUESTS:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await collect(cluster.inference.Generate(bad))
            assert raised.value.code() == grpc.StatusCode[code]
            for word in words:
                assert word in (raised.value.details() or "")


async def test_an_error_that_has_much_to_say_keeps_its_code(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="…") as raised:
            await collect(cluster.inference.Generate(request("x", model="ü" * 20_000)))
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


async def test_internal_errors_do_not_show_their_innards(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        monkeypatch.setattr(cluster.gateway, "prepare", lambda _: 1 / 0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await collect(cluster.inference.Generate(request([5])))
    details = raised.value.details() or ""
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "ZeroDivision" not in details
    assert details.rsplit(" ", 1)[1] in caplog.text, "the log has the incident's number"


async def test_cancelling_frees_everything_that_the_request_held(
    start_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        group = cluster.groups["g0"]
        group.executor.step_s = 0.1
        call = cluster.inference.Generate(request([5] * 20, n=2, max_tokens=350, ignore_eos=True))
        await call.read()
        while group.engine_loop.num_requests != 2:
            await asyncio.sleep(0.01)
        call.cancel()
        await group.settle()
        stats = await group.engine_loop.call(lambda engine: engine.stats())
        assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
        assert group.engine_loop.num_requests == 0
        assert cluster.table.stats().num_in_flight == 0
        assert group.executor.num_steps < 350
    assert "incident" not in caplog.text, "a client that goes away is no error"


async def test_a_second_request_goes_where_its_prefix_is_cached(start_cluster: Any) -> None:
    async with start_cluster(num_groups=3) as cluster:
        prefix = list(range(10, 50))
        starts = []
        for tail in ([60, 61], [70, 71, 72], [80]):
            chunks = await collect(
                cluster.inference.Generate(request(prefix + tail, seed=1, ignore_eos=True))
            )
            assert tokens(chunks) == cluster.model.continuation(
                prefix + tail, seed=1, max_tokens=16
            )
            starts.append(chunks[0].start)
            held = chunks[0].start.routing.group
            while cluster.table.stats().directory.num_blocks < 10:
                await cluster.groups[held].engine_loop.call(lambda engine: None)
    assert starts[0].num_cached_tokens == 0
    assert {start.routing.group for start in starts} == {starts[0].routing.group}
    for start in starts[1:]:
        assert start.num_cached_tokens == 40
        assert start.routing.predicted_cached_tokens == 40
        assert start.routing.reason == "cached_prefix"


async def test_a_salt_keeps_prefixes_apart(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cached = []
        for salt in ("mine", "yours", "mine"):
            message = request(list(range(10, 50)), ignore_eos=True)
            message.cache_salt = salt
            chunks = await collect(cluster.inference.Generate(message))
            cached.append(chunks[0].start.num_cached_tokens)
    assert cached == [0, 0, 36]


async def test_many_requests_at_once_all_get_their_own_tokens(start_cluster: Any) -> None:
    async with start_cluster(num_blocks=60) as cluster:
        cluster.take_steps_of(0.1)  # Slow steps, until both are busy.
        prompts = [[20 + number % 7] * (number + 1) for number in range(40)]
        calls = [
            cluster.inference.Generate(request(prompt, seed=9, max_tokens=20, ignore_eos=True))
            for prompt in prompts
        ]
        while not all(group.executor.num_steps for group in cluster.groups.values()):
            await asyncio.sleep(0.01)
        cluster.take_steps_of(0)
        for prompt, call in zip(prompts, calls, strict=True):
            expected = cluster.model.continuation(prompt, seed=9, max_tokens=20)
            assert tokens(await collect(call)) == expected


async def test_a_lost_batch_of_events_is_asked_for_again(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        take = cluster.connections.events
        lost: list[Any] = []

        def lose_one(client: Any, batch: Any) -> bool:
            if batch.events and not lost:
                lost.append(batch)
                return True
            return bool(take(client, batch))

        monkeypatch.setattr(cluster.connections, "events", lose_one)
        for first in (20, 40):
            prompt = list(range(first, first + 12))
            await collect(cluster.inference.Generate(request(prompt, max_tokens=1)))
            while not lost:
                await asyncio.sleep(0.01)
        while cluster.table.stats().directory.num_blocks < 6:
            await asyncio.sleep(0.01)
        assert cluster.table.stats().directory.num_gaps == 1
