"""The service `vllm.grpc.engine`, through smg-grpc-proto's stubs, compared with our own service."""

import asyncio
import contextlib
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tests.cluster.test_grpc_errors import details, refusal

from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.v1 import inference_pb2 as pb
from quire.worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

PROMPT = [20, 21, 22, 23, 24, 25]


@contextlib.asynccontextmanager
async def stub_of(cluster: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def ask(*, stream: bool = True, request_id: str = "r", **sampling: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=PROMPT, original_text="not looked at"),
        sampling_params=vllm.SamplingParams(**sampling),
        stream=stream,
    )


async def collect(call: Any) -> tuple[list[Any], list[Any]]:
    """A stream's chunks and its final message."""
    messages = [message async for message in call]
    chunks = [each.chunk for each in messages if each.HasField("chunk")]
    return chunks, [each.complete for each in messages if each.HasField("complete")]


async def ours(cluster: Any, **sampling: Any) -> list[pb.GenerateResponse]:
    """Our own service's answer to the same request."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(**sampling)
    )
    return [chunk async for chunk in cluster.inference.Generate(request)]


async def test_a_stream_has_the_tokens_of_our_own_service(start_cluster: Any) -> None:
    async with start_cluster() as cluster, stub_of(cluster) as stub:
        wanted: dict[str, Any] = {
            "seed": 7,
            "max_tokens": 30,
            "ignore_eos": True,
            "temperature": 0.5,
        }
        chunks, ends = await collect(stub.Generate(ask(**wanted)))
        expected = [token for chunk in await ours(cluster, **wanted) for token in chunk.token_ids]
        assert expected == cluster.model.continuation(PROMPT, seed=7, max_tokens=30)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected
        assert sum(chunk.completion_tokens for chunk in chunks) == 30
        assert {chunk.prompt_tokens for chunk in chunks} == {len(PROMPT)}
        (end,) = ends
        assert end.finish_reason == "length"
        assert end.output_ids == chunks[-1].token_ids, "as in vLLM, the last chunk's"


async def test_one_answer_for_each_completion_where_nothing_is_streamed(start_cluster: Any) -> None:
    async with start_cluster() as cluster, stub_of(cluster) as stub:
        chunks, ends = await collect(
            stub.Generate(ask(stream=False, n=3, seed=5, max_tokens=12, ignore_eos=True))
        )
        assert not chunks
        for index, end in enumerate(ends):
            expected = cluster.model.continuation(PROMPT, seed=5 + index, max_tokens=12)
            assert (end.index, list(end.output_ids)) == (index, expected)
            assert (end.prompt_tokens, end.completion_tokens) == (len(PROMPT), 12)
        assert len(ends) == 3
        _, (again,) = await collect(stub.Generate(ask(stream=False, seed=5, max_tokens=12)))
        assert again.cached_tokens > 0


async def test_a_text_is_tokenized_and_defaults_are_vllms(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        prompt = cluster.model.tokenizer.encode("the cat sat")
        request = vllm.GenerateRequest(
            text="the cat sat", sampling_params=vllm.SamplingParams(seed=3, ignore_eos=True)
        )
        _, (end,) = await collect(stub.Generate(request))
        expected = cluster.model.continuation(prompt, seed=3, max_tokens=400 - len(prompt))
        assert list(end.output_ids) == expected, "without max_tokens, as many as there is room for"


async def test_what_stopped_an_answer_is_said(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        expected = cluster.model.continuation(PROMPT, seed=1, max_tokens=60)
        text = cluster.model.tokenizer.decode(expected)
        stop: dict[str, Any] = {"stop_token_ids": [expected[3]], "seed": 1, "ignore_eos": True}
        _, (end,) = await collect(stub.Generate(ask(stream=False, **stop)))
        assert (end.finish_reason, end.matched_token_id) == ("stop", expected[3])
        assert list(end.output_ids) == expected[: len(end.output_ids)]
        stop = {"stop": [text[20:23]], "seed": 1, "ignore_eos": True}
        chunks, (end,) = await collect(stub.Generate(ask(**stop)))
        assert (end.finish_reason, end.matched_stop_str) == ("stop", text[20:23])
        shown = cluster.model.tokenizer.decode([t for chunk in chunks for t in chunk.token_ids])
        assert shown.endswith(text[20:23])


async def test_log_probabilities_are_those_of_our_own_service(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        wanted: dict[str, Any] = {"seed": 2, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
        scores = [entry for chunk in await ours(cluster, **wanted) for entry in chunk.logprobs]
        chunks, _ = await collect(stub.Generate(ask(**wanted)))
        _, (end,) = await collect(stub.Generate(ask(stream=False, **wanted)))
        streamed = vllm.OutputLogProbs()
        for chunk in chunks:
            streamed.MergeFrom(chunk.output_logprobs)
        assert end.output_logprobs == streamed
        assert list(streamed.token_ids) == [entry.token_id for entry in scores]
        assert list(streamed.token_logprobs) == [entry.logprob for entry in scores]
        assert [list(each.token_ids) for each in streamed.top_logprobs] == [
            [top.token_id for top in entry.top] for entry in scores
        ]
        _, (end,) = await collect(stub.Generate(ask(stream=False, max_tokens=2, logprobs=0)))
        assert len(end.output_logprobs.token_logprobs) == 2
        assert not end.output_logprobs.top_logprobs


async def test_the_prompts_log_probabilities_begin_behind_its_first_token(
    start_cluster: Any,
) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        wanted: dict[str, Any] = {"max_tokens": 3, "prompt_logprobs": 1}
        start = (await ours(cluster, **wanted))[0].start
        chunks, _ = await collect(stub.Generate(ask(**wanted)))
        _, (end,) = await collect(stub.Generate(ask(stream=False, **wanted)))
        assert end.input_logprobs == chunks[0].input_logprobs
        assert list(end.input_logprobs.token_ids) == PROMPT
        first, *rest = end.input_logprobs.token_logprobs
        assert not first.HasField("value")
        assert [each.value for each in rest] == [each.logprob for each in start.prompt_logprobs]
        assert [len(each.token_ids) for each in end.input_logprobs.top_logprobs] == [
            0,
            1,
            1,
            1,
            1,
            1,
        ]
        assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])


TAG = """
{"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a>"]}
"""


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"regex": "[ab]{4}"}, {"regex": "[ab]{4}"}),
        ({"json_schema": '{"enum": ["a", "b"]}'}, {"json_schema": '{"enum": ["a", "b"]}'}),
        ({"structural_tag": TAG}, {"structural_tag": TAG}),
        ({"json_object": True}, {"json_schema": '{"type":"object"}'}),
        ({"grammar": 'root ::= "yes" | "no"'}, {"grammar": 'root ::= "yes" | "no"'}),
        (
            {"choice": vllm.ChoiceConstraint(choices=["yes", "no"])},
            {"grammar": 'start: "yes" | "no"'},
        ),
    ],
    ids=lambda value: next(iter(value)),
)
async def test_constraints_hold(
    start_cluster: Any, given: dict[str, Any], same: dict[str, Any]
) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        _, (end,) = await collect(stub.Generate(ask(stream=False, seed=4, max_tokens=20, **given)))
        chunks = await ours(
            cluster, seed=4, max_tokens=20, structured_outputs=pb.Constraint(**same)
        )
        assert list(end.output_ids) == [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_abort_ends_the_request_and_frees_what_it_held(
    start_cluster: Any, stream: bool
) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        group = cluster.groups["g0"]
        group.executor.step_s = 0.05
        call = stub.Generate(
            ask(stream=stream, request_id="a", n=2, max_tokens=350, ignore_eos=True)
        )
        answer = asyncio.ensure_future(collect(call))
        while group.engine_loop.num_requests != 2 or not group.executor.num_steps:
            await asyncio.sleep(0.01)
        await stub.Abort(vllm.AbortRequest(request_ids=["b"]))
        assert group.engine_loop.num_requests == 2
        abort = vllm.AbortRequest(request_ids=["a", "b", "a"])
        await asyncio.gather(*(stub.Abort(abort) for _ in range(5)))
        chunks, ends = await answer
        assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort")]
        assert not (chunks and any(end.output_ids for end in ends))
        await group.settle()
        stats = await group.engine_loop.call(lambda engine: engine.stats())
        assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)
        assert group.engine_loop.num_requests == 0
        assert group.executor.num_steps < 350
        assert await call.code() is grpc.StatusCode.OK


async def test_nobody_aborts_another_tenants_request(start_cluster: Any) -> None:
    keys = ApiKeys({"a": Caller(tenant="a"), "b": Caller(tenant="b")})
    async with start_cluster(num_groups=1, keys=keys) as cluster, stub_of(cluster) as stub:
        group = cluster.groups["g0"]
        group.executor.step_s = 0.05
        mine, others = ((("authorization", f"Bearer {key}"),) for key in "ab")
        call = stub.Generate(ask(max_tokens=350, ignore_eos=True), metadata=mine)
        answers = aiter(call)
        await anext(answers)
        abort = vllm.AbortRequest(request_ids=["r"])
        assert (await refusal(stub.Abort(abort))).code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.Abort(abort, metadata=others)
        assert (await anext(answers)).HasField("chunk")
        await stub.Abort(abort, metadata=mine)
        _, (end,) = await collect(answers)
        assert end.finish_reason == "abort"


FIELDS = [
    (ask(temperature=-1), "sampling_params.temperature"),
    (ask(logprobs=-1), "sampling_params.logprobs"),
    (ask(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
    (ask(seed=-1), "sampling_params.seed"),
    (ask(regex="("), "sampling_params.constraint"),
    (ask(json_object=False), "sampling_params.constraint"),
    (ask(stop_token_ids=[1] * 2000), "sampling_params.stop_token_ids"),
    (vllm.GenerateRequest(), "input"),
    (vllm.GenerateRequest(text=""), "text"),
    (
        vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[99_999])),
        "tokenized.input_ids",
    ),
    (vllm.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank"),
    (vllm.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
    (vllm.GenerateRequest(text="a", mm_inputs=vllm.MultimodalInputs()), "mm_inputs"),
]


async def test_an_invalid_argument_names_its_field(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        for request, field in FIELDS:
            error = await refusal(stub.Generate(request))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            (violation,) = details(error)["BadRequest"].field_violations
            assert violation.field == field, error.details()


async def test_what_is_not_served_is_refused_by_name(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        served = "Generate Embed HealthCheck Abort GetModelInfo GetServerInfo GetLoads GetTokenizer"
        methods = vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods
        for method in methods:
            if method.name not in served.split():
                question = getattr(vllm, method.input_type.name, None) or getattr(
                    common_pb2, method.input_type.name
                )
                error = await refusal(getattr(stub, method.name)(question()))
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED
                assert str(error.details()).startswith(f"{method.name}: ")
                assert details(error)["ErrorInfo"].reason == "UNIMPLEMENTED"


async def test_only_operators_see_the_load_of_all_tenants(start_cluster: Any) -> None:
    keys = ApiKeys({"mine": Caller(tenant="a"), "boss": Caller(tenant="b", is_operator=True)})
    async with start_cluster(num_groups=1, keys=keys) as cluster, stub_of(cluster) as stub:
        for key, code in (
            ("mine", grpc.StatusCode.PERMISSION_DENIED),
            ("boss", grpc.StatusCode.OK),
        ):
            metadata = (("authorization", f"Bearer {key}"),)
            assert await stub.GetLoads(vllm.GetLoadsRequest(), metadata=metadata).code() == code


async def test_it_tells_of_model_server_and_load(start_cluster: Any) -> None:
    async with start_cluster() as cluster, stub_of(cluster) as stub:
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.max_context_length) == ("hash", 400)
        assert list(info.eos_token_ids) == [cluster.model.eos]
        await collect(stub.Generate(ask(max_tokens=2)))
        server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.active_requests, server.data_parallel_size) == (0, 1)
        assert server.block_size == cluster.connections.card.block_size
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest(dp_rank=0))).loads
        assert load.num_total_reqs == 0
        assert load.max_total_num_tokens > 0
        assert load.max_running_requests == server.max_num_seqs > 0
        error = await refusal(stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)))
        assert details(error)["BadRequest"].field_violations[0].field == "dp_rank"
        cluster.models.begin_drain()
        answer = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "the gateway is stopping")


async def test_health_and_reflection_know_the_service(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        name = "vllm.grpc.engine.VllmEngine"
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        assert len(files) == 2


async def test_the_tokenizer_can_be_made_again_from_its_bundle(
    start_cluster: Any, tmp_path: Path
) -> None:
    async with start_cluster(num_groups=1) as cluster, stub_of(cluster) as stub:
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    bundle = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(bundle).hexdigest()
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        files.extractall(tmp_path)
    again, ours = Tokenizer.load(tmp_path), cluster.model.tokenizer
    assert again.encode("the cat über <|end|>") == ours.encode("the cat über <|end|>")
    chat = [{"role": "user", "content": "the mat"}]
    assert again.render_chat(chat) == ours.render_chat(chat)
