"""LoRA adapters through gateways and groups of a real model, against transformers."""

import asyncio
import contextlib
import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from tests import peft_files
from transformers import AutoModelForCausalLM

from quire import demo_model
from quire.cluster.cli.lora import lora_modules
from quire.cluster.cli.main import main
from quire.cluster.config import ClusterConfig, LoraModule
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.features.adapters.catalog import Word
from quire.cluster.group.server import GroupServer
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire_client import AsyncClient, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12] * 3, [40, 41, 42, 43, 44, 45, 46, 47] * 3]
NUM_TOKENS = 24
NAMES = ("sql", "chat", "support")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Made(NamedTuple):
    folders: dict[str, Path]
    expected: dict[str, list[list[int]]]
    """transformers' tokens for `PROMPTS` by adapter; those without an adapter are under "demo"."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("adapters")
    expected = {"demo": _greedy(_model())}
    for seed, name in enumerate(NAMES):
        peft_files.write(root / name, _model(), seed=seed)
        expected[name] = _greedy(peft_files.merge(_model(), root / name))
    assert len({str(each) for each in expected.values()}) == 1 + len(NAMES)
    return Made({name: root / name for name in NAMES}, expected)


def _model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)


@torch.inference_mode()
def _greedy(model: Any) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    return [
        model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def config_of(made: Made) -> ClusterConfig:
    engine = EngineConfig(
        model=demo_model.PATH,
        dtype="float32",
        num_blocks=128,
        num_threads=1,
        enable_lora=True,
        max_loras=2,
        max_num_seqs=16,
    )
    modules = tuple(LoraModule(name=name, path=str(made.folders[name])) for name in NAMES[:2])
    return ClusterConfig(
        engine=engine, served_model_name="demo", lora_modules=modules, grpc_port=0, http_port=0
    )


class Cluster:
    """Two gateways that know each other, and two groups."""

    def __init__(self) -> None:
        self.gateways: list[GatewayServer] = []
        self.groups: list[GroupServer] = []

    async def words(self) -> list[Word]:
        return [word for each in self.gateways for word in each.models.adapters.words()]

    async def tell(self, words: Any) -> str:
        for each in self.gateways:
            each.models.adapters.hear(words)
        return ""


@contextlib.asynccontextmanager
async def started(made: Made) -> AsyncIterator[Cluster]:
    cluster, config = Cluster(), config_of(made)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(2):
            group = await GroupServer.start(config, group_id=f"g{number}")
            stack.push_async_callback(group.stop, drain_timeout_s=0)
            cluster.groups.append(group)
        for _ in range(2):
            gateway = await GatewayServer.start(config, ask_others=cluster.words)
            stack.push_async_callback(gateway.stop, drain_timeout_s=0)
            gateway.models.adapters.tell_others = cluster.tell
            gateway.set_groups([each.contact for each in cluster.groups])
            groups = gateway.models.named("demo").groups
            while groups.num_ready < 2:
                await groups.wait_for_change(timeout_s=1)
            cluster.gateways.append(gateway)
        yield cluster


@pytest.fixture(scope="module")
async def cluster(made: Made, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ADAPTER_DIR", str(tmp_path_factory.mktemp("store")))
        async with started(made) as cluster:
            yield cluster


async def tokens(gateway: GatewayServer, name: str, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with AsyncClient(gateway.grpc_address) as client:
        (completion,) = await client.generate(prompt, params, model=name)
    assert completion.start.model == name
    return list(completion.token_ids)


async def test_requests_of_two_adapters_and_none_have_transformers_tokens(
    cluster: Cluster, made: Made
) -> None:
    jobs = [
        (name, number, gateway)
        for _ in range(2)
        for gateway in cluster.gateways
        for number in range(len(PROMPTS))
        for name in ("demo", "sql", "chat")
    ]
    answers = await asyncio.gather(*(tokens(g, name, PROMPTS[n]) for name, n, g in jobs))
    assert answers == [made.expected[name][number] for name, number, _ in jobs]


async def test_what_one_gateway_loads_the_other_serves(cluster: Cluster, made: Made) -> None:
    first, second = cluster.gateways
    openai = AsyncOpenAI(base_url=f"http://{second.http_address}/v1", api_key="none")
    async with openai, httpx.AsyncClient(base_url=f"http://{first.http_address}") as client:
        body = {"lora_name": "support", "lora_path": str(made.folders["support"])}
        answer = await client.post("/v1/load_lora_adapter", json=body, timeout=None)
        assert answer.status_code == 200, answer.text
        listed = {each.id: each for each in (await openai.models.list()).data}
        assert listed.keys() == {"demo", *NAMES}
        stream = await openai.completions.create(
            model="support",
            prompt=PROMPTS[0],
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        found: list[int] = []
        async for chunk in stream:
            assert chunk.model == "support"
            found += (chunk.choices[0].model_extra or {})["token_ids"] if chunk.choices else []
        assert found == made.expected["support"][0]

        # Other weights under the same name.
        body["lora_path"] = str(made.folders["sql"])
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        for gateway in cluster.gateways:
            assert await tokens(gateway, "support", PROMPTS[1]) == made.expected["sql"][1]
        unload = await client.post("/v1/unload_lora_adapter", json={"lora_name": "support"})
        assert unload.status_code == 200
        decisions = (await client.get("/v1/routing/decisions")).json()["data"]
    costs = [
        each["adapter_cost"]
        for one in decisions
        for each in one["routing"]["candidates"]
        if "adapter_cost" in each
    ]
    assert 0.0 in costs


async def test_an_adapter_of_another_model_is_refused(
    cluster: Cluster, made: Made, tmp_path: Path
) -> None:
    foreign = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4)})
    peft_files.write(tmp_path / "foreign", foreign, seed=1, targets=["q_proj"])
    gateway = cluster.gateways[0]
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}") as client:
        body = {"lora_name": "foreign", "lora_path": str(tmp_path / "foreign")}
        answer = await client.post("/v1/load_lora_adapter", json=body, timeout=None)
    assert answer.status_code == 400
    assert "q_proj" in answer.json()["error"]["message"]
    assert [each.name for each in gateway.models.adapters] == ["chat", "sql"]


async def test_the_commands_of_the_documents_answer(
    cluster: Cluster, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[4] / "docs/adapters.md").read_text()
    gateway = cluster.gateways[0]
    root = next(iter(made.folders.values())).parent
    page = page.replace("/adapters/", f"{root}/")
    calls = re.findall(r"curl -s http://127\.0\.0\.1:8000(\S+)(?: .*-d '(.*)')?", page)
    assert len(calls) == 4
    async with httpx.AsyncClient(base_url=f"http://{gateway.http_address}") as client:
        for path, body in calls:
            method = "POST" if body else "GET"
            json_body = json.loads(body) if body else None
            answer = await client.request(method, path, json=json_body, timeout=None)
            assert answer.status_code == 200, answer.text
    commands = re.findall(r"\.venv/bin/quire (adapter .*)", page)
    assert len(commands) == 3
    printed = []
    for command in commands:
        arguments = [*shlex.split(command), "--address", gateway.grpc_address]
        assert await asyncio.to_thread(main, arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("support is ")
    assert "support" in printed[1]
    assert printed[2] == "support is unloaded\n"


async def test_a_group_that_is_lost_costs_no_stream_of_an_adapter(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ADAPTER_DIR", str(tmp_path))
    async with started(made) as cluster:
        jobs = [
            (name, number, gateway)
            for _ in range(3)
            for gateway in cluster.gateways
            for number in range(len(PROMPTS))
            for name in ("demo", "sql", "chat")
        ]
        runs = [asyncio.ensure_future(tokens(g, name, PROMPTS[n])) for name, n, g in jobs]
        while not all(each.stats.num_output_tokens for each in cluster.groups):
            await asyncio.sleep(0.01)
        await cluster.groups[0]._server.stop(None)
        answers = await asyncio.gather(*runs)
    assert answers == [made.expected[name][number] for name, number, _ in jobs]


def test_modules_are_spelled_as_in_vllm() -> None:
    given = [
        "sql=/a/sql",
        "chat=ORG/NAME@abc@two",
        "pinned=ORG/NAME@abc@one",
        '{"name": "json", "path": "/a=b", "base_model_name": "two"}',
    ]
    alone = lora_modules([given[0], "pinned=ORG/NAME@abc"], models=["one"])
    assert [(each.name, each.path) for each in alone["one"]] == [
        ("sql", "/a/sql"),
        ("pinned", "ORG/NAME@abc"),
    ]
    found = lora_modules(given[1:], models=["one", "two"])
    assert [(each.name, each.path) for each in found["two"]] == [
        ("chat", "ORG/NAME@abc"),
        ("json", "/a=b"),
    ]
    assert [each.name for each in found["one"]] == ["pinned"]
    for wrong, why in (
        ("sql", "NAME=PATH"),
        ("=x", "NAME=PATH"),
        ("sql=/a", "says not which of one, two"),
        ("{", "is no JSON"),
        ('{"name": "a", "path": 1}', "its fields are texts"),
        ('{"name": "a", "path": "b", "base_model_name": "c"}', "'c' is not served"),
    ):
        with pytest.raises(ConfigError, match=why):
            lora_modules([wrong], models=["one", "two"])


def test_modules_without_the_setting_or_under_a_models_name_are_refused(made: Made) -> None:
    engine = EngineConfig(model=demo_model.PATH)
    module = LoraModule(name="demo", path="x")
    with pytest.raises(ConfigError, match=r"set engine\.enable_lora"):
        ClusterConfig(engine=engine, lora_modules=(module,))
    lora = EngineConfig(model=demo_model.PATH, enable_lora=True)
    with pytest.raises(ConfigError, match="'demo' is the name of another adapter or of a model"):
        ClusterConfig(engine=lora, served_model_name="demo", lora_modules=(module,))
    with pytest.raises(ConfigError, match="nodes_per_group=2: must be 1"):
        ClusterConfig(
            engine=EngineConfig(model=demo_model.PATH, enable_lora=True, tensor_parallel_size=2),
            nodes_per_group=2,
        )
