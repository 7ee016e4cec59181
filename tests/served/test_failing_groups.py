"""If the groups of one of two models cannot start, the other model is served."""

import time
from dataclasses import replace

import httpx
import pytest
from tests.served.conftest import CONFIG

from quire.cluster.config import ModelConfig
from quire.cluster.deploy.app import running_app
from quire.cluster.deploy.local import ray_session

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]


def test_the_other_one_serves_and_clients_are_told_why_this_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = replace(CONFIG.engine, tensor_parallel_size=1)
    starved = replace(engine, num_blocks=None, kv_cache_memory_bytes=10)
    config = replace(
        CONFIG,
        engine=starved,
        served_model_name="starved",
        more_models=(ModelConfig(engine=engine, served_model_name="fed"),),
        num_groups=1,
    )
    with ray_session(), running_app(config, name="two") as endpoints:
        url = f"http://{endpoints.http}/v1"
        told = capsys.readouterr().err
        body = {"model": "fed", "prompt": "A", "max_tokens": 1}
        assert httpx.post(f"{url}/completions", json=body, timeout=None).status_code == 200
        while (state := httpx.get(f"{url}/models/starved").json())["state"] == "starting":
            time.sleep(0.1)
        refused = httpx.post(f"{url}/completions", json=body | {"model": "starved"}, timeout=None)
    why = "the KV cache holds 0 blocks of 16 tokens"
    assert told.startswith(f"quire: starved cannot be served: ReplicaGroup: ConfigError: {why}")
    assert state["state"] == "failed"
    assert why in state["reason"]
    assert refused.status_code == 503
    assert why in refused.text
