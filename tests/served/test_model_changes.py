"""Models are added, replaced and removed while a cluster serves; no stream fails or mixes two."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ray import serve
from tests.served.conftest import CONFIG, ROOT, marked_processes
from tests.served.paced_group import ReplicaGroup
from tests.served.serve_process import serving
from tests.served.test_upgrade import free_port

from quire import demo_model
from quire.cluster.cli.cluster import cluster_config
from quire.cluster.cli.commands import command_line
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.deploy.app import SILENT, Endpoints, running_app
from quire.cluster.deploy.change import add_model, model_states, remove_model, replace_model
from quire.cluster.deploy.local import ray_session
from quire.cluster.tools.generate import generate
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import CheckpointError, ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "chats"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NUM_TOKENS = 24
NUM_CLIENTS = 4
ENGINE = replace(CONFIG.engine, tensor_parallel_size=1, max_num_seqs=8)


@pytest.fixture(scope="module")
def weights(make_llama: Any) -> dict[str, Path]:
    """Checkpoints with the same tokenizer, and one without its tokenizer."""
    from transformers import AutoConfig

    size = AutoConfig.from_pretrained(demo_model.PATH).vocab_size
    found = {}
    for seed, name in enumerate(("first", "second", "third", "broken"), 1):
        found[name] = make_llama(name, seed=seed, vocab_size=size)
        if name != "broken":
            for file in demo_model.PATH.glob("*token*"):
                shutil.copy(file, found[name])
    return found


@pytest.fixture(scope="module")
def expected(weights: dict[str, Path]) -> dict[str, list[int]]:
    """transformers' greedy answers."""
    import torch
    from transformers import AutoModelForCausalLM

    found = {}
    for name in ("first", "second", "third"):
        model: Any = AutoModelForCausalLM.from_pretrained(weights[name], dtype=torch.float32)
        model.generation_config.eos_token_id = None
        output = model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0
        )
        found[name] = output[0, len(PROMPT) :].tolist()
    assert len({tuple(each) for each in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def served(pace_file: Path, weights: dict[str, Path]) -> Iterator[Endpoints]:
    """A cluster of two gateways with one model, "chat"."""
    config = ClusterConfig(
        engine=replace(ENGINE, model=weights["first"]),
        served_model_name="chat",
        aliases=("gpt-4",),
        num_gateways=2,
        grpc_port=free_port(),
        http_port=free_port(),
        drain_timeout_s=60,
        max_queue_wait_s=1000,
    )
    with (
        marked_processes(),
        ray_session(),
        running_app(config, name=NAME, group=ReplicaGroup) as endpoints,
    ):
        yield endpoints


class Clients:
    """Clients that send requests to "chat", each over its own connection, until the block ends."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.answers: list[list[int]] = []
        self.failures: list[str] = []
        self._address = endpoints.grpc
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]

    def __enter__(self) -> "Clients":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()

    def wait_for(self, num_answers: int) -> None:
        """Waits for this many more answers."""
        wanted = len(self.answers) + num_answers
        while len(self.answers) < wanted and not self.failures:
            time.sleep(0.05)

    def _ask(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            while not self._is_over.is_set():
                try:
                    self.answers.append(tokens(channel, "chat"))
                except grpc.RpcError as error:
                    self.failures.append(repr(error))


def request(model: str) -> pb.GenerateRequest:
    made = pb.GenerateRequest(model=model)
    made.token_ids.ids.extend(PROMPT)
    made.sampling.max_tokens = NUM_TOKENS
    made.sampling.ignore_eos = True
    made.sampling.temperature = 0
    return made


def tokens(channel: grpc.Channel, model: str) -> list[int]:
    return [each for chunk in generate(channel, request(model)) for each in chunk.token_ids]


def model(path: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(engine=replace(ENGINE, model=path), **changes)


def listed(endpoints: Endpoints) -> dict[str, str]:
    """States of the models, by each of their names."""
    data = httpx.get(f"http://{endpoints.http}/v1/models").json()["data"]
    return {each["id"]: each["state"] for each in data}


def test_models_come_and_go_under_the_streams_of_another(
    served: Endpoints,
    pace: Callable[[float], None],
    weights: dict[str, Path],
    expected: dict[str, list[int]],
) -> None:
    with grpc.insecure_channel(served.grpc) as channel:
        with Clients(served) as clients:
            clients.wait_for(NUM_CLIENTS)
            add_model(
                NAME, model(weights["second"], served_model_name="other"), group=ReplicaGroup,
                progress=SILENT,
            )  # fmt: skip
            assert listed(served) == dict.fromkeys(("chat", "other", "gpt-4"), "ready")
            assert tokens(channel, "other") == expected["second"]
            pace(0.1)
            under_way = generate(channel, request("other"))
            seen = list(next(under_way).token_ids)
            remove_model(NAME, "other", progress=SILENT)
            seen += [each for chunk in under_way for each in chunk.token_ids]
            clients.wait_for(NUM_CLIENTS)
        assert seen == expected["second"]
        with pytest.raises(grpc.RpcError, match="the model 'other' does not exist: 'chat' is"):
            tokens(channel, "other")
    assert clients.failures == []
    assert {tuple(each) for each in clients.answers} == {tuple(expected["first"])}
    assert parts() == {"chat"}


def test_new_weights_take_over_and_no_stream_has_tokens_of_both(
    served: Endpoints,
    pace: Callable[[float], None],
    weights: dict[str, Path],
    expected: dict[str, list[int]],
) -> None:
    with Clients(served) as clients:
        clients.wait_for(NUM_CLIENTS)
        pace(0.05)
        replace_model(NAME, "chat", weights["third"], group=ReplicaGroup, progress=SILENT)
        num_before = len(clients.answers)
        clients.wait_for(2 * NUM_CLIENTS)
    assert clients.failures == []
    kinds = {tuple(expected[name]): name for name in ("first", "third")}
    answers = [kinds.get(tuple(each), "mixed") for each in clients.answers]
    assert set(answers) == {"first", "third"}
    assert set(answers[num_before + NUM_CLIENTS :]) == {"third"}
    assert listed(served) == {"chat": "ready", "gpt-4": "ready"}
    assert parts() == {"chat:2"}
    page = httpx.get(f"http://{served.http}/metrics").text
    (line,) = [each for each in page.splitlines() if each.startswith("quire_ready_groups{")]
    assert line == 'quire_ready_groups{model="chat"} 1.0'


def test_what_cannot_be_added_or_replaced_leaves_all_as_it_was(
    served: Endpoints, weights: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    before = model_states(NAME), parts()
    too_small = replace(ENGINE, model=weights["second"], num_blocks=None, kv_cache_memory_bytes=10)
    with pytest.raises(CheckpointError, match="tokenizer"):
        replace_model(NAME, "chat", weights["broken"], progress=SILENT)
    with pytest.raises(ConfigError, match="set kv_cache_memory_bytes=262144 or more"):
        add_model(NAME, ModelConfig(engine=too_small), progress=SILENT)
    with pytest.raises(ConfigError, match="'gpt-4': a model of chats is called that already"):
        add_model(NAME, model(weights["second"], served_model_name="gpt-4"), progress=SILENT)
    with pytest.raises(ConfigError, match="'x': no model of chats is called that; there are 'chat"):
        remove_model(NAME, "x", progress=SILENT)
    with pytest.raises(ConfigError, match="is the only model of chats: `quire stop chats`"):
        remove_model(NAME, "chat", progress=SILENT)
    assert (model_states(NAME), parts()) == before
    with grpc.insecure_channel(served.grpc) as channel:
        assert tokens(channel, "chat") == expected["third"]


def test_a_gateway_that_starts_again_has_the_models_that_were_added(
    served: Endpoints, weights: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    add_model(NAME, model(weights["second"], served_model_name="other"), progress=SILENT)
    handle = serve.get_deployment_handle("Gateway", app_name=NAME)
    before = gateway_pids()
    assert len(before) == 2
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 120
    while len(gateway_pids() - before) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    while True:
        try:
            assert handle.wait_for_groups.remote(["chat", "other"]).result() == []
            with grpc.insecure_channel(served.grpc) as channel:
                assert tokens(channel, "chat") == expected["third"]
                assert tokens(channel, "other") == expected["second"]
            break
        except Exception:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def gateway_pids() -> set[int]:
    """Process ids of the running gateways."""
    details = serve.context._get_global_client().get_serve_details()  # type: ignore[union-attr]
    replicas = details["applications"][NAME]["deployments"]["Gateway"]["replicas"]
    return {each["pid"] for each in replicas if each["state"] == "RUNNING"}


def parts() -> set[str]:
    names = serve.status().applications
    return {name.removeprefix(f"{NAME}:") for name in names if name.startswith(f"{NAME}:")}


@pytest.mark.usefixtures("no_process_is_left")
def test_a_broken_model_leaves_the_others_alone_and_is_told(weights: dict[str, Path]) -> None:
    same = ["--name", "chats", "--num-threads", "1"]
    with serving(*same, str(weights["first"]), str(weights["broken"])) as (server, _, http):
        assert server.stdout is not None
        assert server.stderr is not None
        told = server.stderr.readline()
        address = server.stdout.readline().split()[1]
        states = {each["id"]: each for each in httpx.get(f"http://{http}/v1/models").json()["data"]}
        body = {"model": "first", "prompt": PROMPT, "max_tokens": 2}
        answer = httpx.post(f"http://{http}/v1/completions", json=body, timeout=None)
        refused = httpx.post(f"http://{http}/v1/completions", json=body | {"model": "broken"})
        flags = ["--name", "chats", "--ray-address", address]
        seen = quire("list", *flags)
        replaced = quire("replace", "broken", str(weights["second"]), *flags)
        mended = httpx.post(
            f"http://{http}/v1/completions", json=body | {"model": "broken"}, timeout=None
        )
    assert told.startswith("quire: broken cannot be served: ")
    assert states["first"]["state"] == "ready"
    assert states["broken"]["state"] == "failed"
    assert "tokenizer" in states["broken"]["reason"]
    assert answer.status_code == 200
    assert refused.status_code == 503
    assert "the model 'broken' cannot be served: " in refused.text
    rows = [line.split() for line in seen.stdout.splitlines()]
    assert rows[0] == ["name", "aliases", "state", "groups", "path"]
    assert rows[1] == ["first", "-", "ready", "1", str(weights["first"])]
    assert rows[2][:3] == ["broken", "-", "failed:"]
    assert replaced.returncode == 0, replaced.stderr
    assert mended.status_code == 200


def quire(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire", "model", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.usefixtures("no_process_is_left")
def test_the_commands_of_the_documents_work(weights: dict[str, Path], tmp_path: Path) -> None:
    # The context of this test's models.
    page = (ROOT / "docs/several-models.md").read_text().replace("8192", "512")
    commands = re.findall(r"^    quire model (.+)$", page, re.MULTILINE)
    assert [each.split()[0] for each in commands] == ["list", "add", "replace", "remove"]
    served, *_ = re.findall(r"^    quire serve (.+)$", page, re.MULTILINE)
    settings, _ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "models.yaml"
    file.write_text(settings)
    config = cluster_config(command_line().parse_args(["serve", "--config", str(file)]))
    assert {name: each.min_groups for name, each in config.models.items()} == {
        "large": 1,
        "small": 2,
    }

    def here(command: str) -> list[str]:
        """The command with local checkpoints in place of the hub's."""
        paths = [str(weights[name]) for name in ("first", "second", "third")]
        hub = dict.fromkeys(re.findall(r"Qwen/\S+", page))
        return [
            paths[list(hub).index(each) % 3] if each in hub else each for each in command.split()
        ]

    with serving("--num-threads", "1", *here(served)) as (server, _, http):
        assert server.stdout is not None
        ray = ["--ray-address", server.stdout.readline().split()[1]]
        known = []
        for command in commands:
            done = quire(*here(command), *ray)
            assert done.returncode == 0, (command, done.stderr)
            data = httpx.get(f"http://{http}/v1/models").json()["data"]
            known.append([each["id"] for each in data])
            assert {each["state"] for each in data} == {"ready"}
    both = ["small", "large"]
    assert known == [both, [*both, "embed"], [*both, "embed"], both]
