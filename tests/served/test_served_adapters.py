"""LoRA adapters on Ray: an adapter loaded at one gateway is known to all, also to later ones."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch
from ray import serve
from tests import peft_files
from tests.served.conftest import APP_NAME, CONFIG, marked_processes
from transformers import AutoModelForCausalLM

from quire import demo_model
from quire.cluster.config import LoraModule
from quire.cluster.deploy.app import running_app
from quire.cluster.deploy.local import ray_session

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    return {
        name: peft_files.write(root / name, model, seed=seed)
        for seed, name in enumerate(("sql", "support"))
    }


@pytest.fixture(scope="module")
def gateways(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    engine = replace(CONFIG.engine, tensor_parallel_size=1, enable_lora=True, max_loras=2)
    module = LoraModule(name="sql", path=str(folders["sql"]))
    config = replace(CONFIG, engine=engine, num_gateways=2, lora_modules=(module,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ADAPTER_DIR", str(tmp_path_factory.mktemp("store")))
        with marked_processes(), ray_session(), running_app(config, name=APP_NAME):
            yield serve.get_deployment_handle("Gateway", app_name=APP_NAME)


def urls(gateways: Any) -> list[str]:
    """HTTP URLs of the running gateways."""
    said = gateways.broadcast("addresses").results(return_exceptions=True)
    return [f"http://{each[1]}" for each in said if not isinstance(each, BaseException)]


def names(url: str) -> set[str]:
    listed = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    return {each["id"] for each in listed}


def test_a_gateway_that_is_replaced_learns_what_was_loaded(
    gateways: Any, folders: dict[str, Path]
) -> None:
    first, second = urls(gateways)
    body = {"lora_name": "support", "lora_path": str(folders["support"])}
    answer = httpx.post(f"{first}/v1/load_lora_adapter", json=body, timeout=None)
    assert answer.text == "Success: LoRA adapter 'support' added successfully."
    assert names(first) == names(second) == {"demo", "sql", "support"}
    assert httpx.post(
        f"{second}/v1/unload_lora_adapter", json={"lora_name": "sql"}, timeout=60
    ).is_success
    assert names(first) == {"demo", "support"}

    (victim, *_) = [
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"].startswith(f"SERVE_REPLICA::{APP_NAME}#Gateway#")
    ]
    ray.kill(ray.get_actor(victim, namespace="serve"))
    while len(found := set(urls(gateways))) < 2 or found == {first, second}:
        time.sleep(0.5)
    for url in found:
        assert names(url) == {"demo", "support"}
        asked = {"model": "support", "prompt": "x", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=None)
        assert answer.json()["model"] == "support", answer.text
