"""Several models behind one gateway, each with its own name, groups and metrics."""

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.group.server import GroupServer
from quire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoints(make_llama: Any) -> dict[str, Path]:
    """Two checkpoints with the same tokenizer and different weights."""
    other = make_llama("other", seed=7, vocab_size=_vocab_size())
    for file in demo_model.PATH.glob("*token*"):
        shutil.copy(file, other)
    return {"demo": demo_model.PATH, "org/other": other}


def _vocab_size() -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(demo_model.PATH).vocab_size
    return size


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[int]]:
    """transformers' greedy answers."""
    import torch
    from transformers import AutoModelForCausalLM

    found = {}
    for name, path in checkpoints.items():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        ids = torch.tensor([PROMPT])
        output = model.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0)
        found[name] = output[0, len(PROMPT) :].tolist()
    assert found["demo"] != found["org/other"]
    return found


def config_of(checkpoints: dict[str, Path]) -> ClusterConfig:
    def engine(name: str, **more: Any) -> EngineConfig:
        return EngineConfig(
            model=checkpoints[name], dtype="float32", num_blocks=64, num_threads=1, **more
        )

    return ClusterConfig(
        engine=engine("demo"),
        served_model_name="demo",
        aliases=("gpt-4", "default"),
        more_models=(
            ModelConfig(
                engine=engine("org/other", block_size=32, max_model_len=96),
                served_model_name="org/other",
            ),
        ),
        grpc_port=0,
        http_port=0,
        group_wait_s=0,
    )


@contextlib.asynccontextmanager
async def serving(config: ClusterConfig, *names: str) -> AsyncIterator[GatewayServer]:
    """A gateway for all models, with a group for each of ``names``."""
    async with contextlib.AsyncExitStack() as stack:
        server = await GatewayServer.start(config)
        stack.push_async_callback(server.stop, drain_timeout_s=0)
        for name in names:
            group = await GroupServer.start(config.models[name], group_id=f"g-{name}")
            stack.push_async_callback(group.stop, drain_timeout_s=0)
            server.set_groups([group.contact], model=name)
            groups = server.models.named(name).groups
            while not groups.num_ready:
                await groups.wait_for_change(timeout_s=1)
        yield server


def generate(model: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest(model=model)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.max_tokens = NUM_TOKENS
    request.sampling.ignore_eos = True
    request.sampling.temperature = 0
    return request


async def values(client: httpx.AsyncClient, server: GatewayServer) -> dict[tuple[str, str], float]:
    """Samples of metrics, by metric and model."""
    page = (await client.get(f"http://{server.http_address}/metrics")).text
    return {
        (sample.name, sample.labels.get("model", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def test_two_models_by_configuration(
    checkpoints: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async with (
        serving(config_of(checkpoints), *checkpoints) as server,
        httpx.AsyncClient(timeout=None) as client,
        AsyncOpenAI(base_url=f"http://{server.http_address}/v1", api_key="none") as openai_client,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        listed = (await client.get(f"http://{server.http_address}/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == [*checkpoints, "gpt-4", "default"]
        assert [each["root"] for each in listed] == [*checkpoints, "demo", "demo"]
        assert {each["state"] for each in listed} == {"ready"}
        assert listed[1]["max_model_len"] == 96 != listed[0]["max_model_len"]
        assert (await openai_client.models.retrieve("org/other")).id == "org/other"

        assert (await openai_client.models.retrieve("gpt-4")).id == "gpt-4"
        called: Any = await openai_client.completions.create(
            model="gpt-4", prompt=PROMPT, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}
        )
        assert called.model == "demo"

        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for name, tokens in expected.items():
            answer: Any = await openai_client.completions.create(
                model=name,
                prompt=PROMPT,
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.model == name
            assert answer.choices[0].token_ids == tokens
            over_grpc = [
                token async for part in stub.Generate(generate(name)) for token in part.token_ids
            ]
            assert over_grpc == tokens
            asked: Any = pb.ExplainRoutingRequest(request_id=answer.id)
            (decision,) = (await stub.ExplainRouting(asked)).decisions
            assert decision.routing.group == f"g-{name}"

        recent = (await stub.ExplainRouting(pb.ExplainRoutingRequest(limit=3))).decisions
        assert [each.routing.group for each in recent] == ["g-org/other"] * 2 + ["g-demo"]
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        groups = (await admin.ListGroups(admin_pb2.ListGroupsRequest())).groups
        assert {each.id: each.model for each in groups} == {f"g-{n}": n for n in checkpoints}

        async for _ in stub.Generate(generate("demo")):
            pass
        metrics = await values(client, server)
        for name, num in (("demo", 4), ("org/other", 2)):
            assert metrics["quire_output_tokens_total", name] == num * NUM_TOKENS
            assert metrics["quire_group_output_tokens_total", name] >= num * NUM_TOKENS
            assert metrics["quire_routing_decisions_kept", name] == num
            assert metrics["quire_ready_groups", name] == 1
        assert {name for metric, name in metrics if "http" in metric or "body" in metric} == {""}
        assert ("quire_output_tokens_total", "") not in metrics


async def test_a_name_that_is_unknown_or_missing_is_refused_with_those_there_are(
    checkpoints: dict[str, Path],
) -> None:
    unknown = "the model 'x' does not exist: 'demo', 'org/other' are served"
    missing = "model is missing: name one of 'demo', 'org/other'"
    async with (
        serving(config_of(checkpoints)) as server,
        httpx.AsyncClient(timeout=None, base_url=f"http://{server.http_address}") as client,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            named = await client.post(path, json=body | {"model": "x"})
            assert (named.status_code, named.json()["error"]["message"]) == (404, unknown)
            unnamed = await client.post(path, json=body)
            assert (unnamed.status_code, unnamed.json()["error"]["message"]) == (400, missing)
        assert (await client.get("/v1/models/x")).status_code == 404

        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        not_found, invalid = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
        for name, code, why in (("x", not_found, unknown), ("", invalid, missing)):
            for call in (
                stub.Generate(generate(name)).read(),
                stub.Tokenize(pb.TokenizeRequest(model=name, text="x")),
                stub.Detokenize(pb.DetokenizeRequest(model=name, token_ids=[5])),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=why) as raised:
                    await call
                assert raised.value.code() == code


async def test_messages_without_a_name_are_for_the_first_model(
    checkpoints: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async with (
        serving(config_of(checkpoints), *checkpoints) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = vllm_engine_pb2.GenerateRequest(request_id="r")
        request.tokenized.input_ids.extend(PROMPT)
        request.sampling_params.max_tokens = NUM_TOKENS
        request.sampling_params.ignore_eos = True
        request.sampling_params.temperature = 0
        (answer,) = [each async for each in vllm.Generate(request) if each.HasField("complete")]
        assert list(answer.complete.output_ids) == expected["demo"]
        told = await vllm.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert told.served_model_name == "demo"


async def test_a_model_without_groups_does_not_stop_the_others(
    checkpoints: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    async with (
        serving(config_of(checkpoints), "org/other") as server,
        httpx.AsyncClient(timeout=None, base_url=f"http://{server.http_address}") as client,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        health = await client.get("/health")
        assert health.json() == {"status": "ready", "ready_groups": 1}
        check: Any = health_pb2_grpc.HealthStub(channel)
        serving_now = health_pb2.HealthCheckResponse.SERVING
        assert (await check.Check(health_pb2.HealthCheckRequest())).status == serving_now
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        listed = (await client.get("/v1/models")).json()["data"]
        states = {each["id"]: each["state"] for each in listed}
        assert (states["demo"], states["org/other"]) == ("starting", "ready")
        lost = await client.post("/v1/completions", json=body | {"model": "demo"})
        assert lost.status_code == 503
        answer = await client.post("/v1/completions", json=body | {"model": "org/other"})
        assert answer.json()["choices"][0]["token_ids"] == expected["org/other"]


def test_two_models_of_one_name_are_refused() -> None:
    engine = EngineConfig(model=demo_model.PATH)
    with pytest.raises(ConfigError, match="two models are called 'm'; give one of them another"):
        ClusterConfig(
            engine=engine,
            served_model_name="m",
            more_models=(ModelConfig(engine=engine, served_model_name="m"),),
        )
