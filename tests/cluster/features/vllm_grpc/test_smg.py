"""smg, a gateway for vLLM's gRPC engines, in front of Quire's gateway as if that were an engine."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cluster.features.kv_events.test_kv_events import state

SMG = shutil.which("smg", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(SMG is None, reason="needs smg: pip install smg"),
]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@contextlib.asynccontextmanager
async def smg_over(
    cluster: Any, *flags: str, metrics_port: int | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an smg with ``cluster`` as its only worker."""
    assert SMG is not None
    port, metrics_port = free_port(), metrics_port or free_port()
    process = await asyncio.create_subprocess_exec(
        SMG,
        "launch",
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-urls", f"grpc://{cluster.grpc_address}"),
        *flags,
        # It does not find the model on the hub, and so asks us for the tokenizer.
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
            while not await has_tokenizer(client):
                assert process.returncode is None
                await asyncio.sleep(0.1)
            yield client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def has_tokenizer(client: httpx.AsyncClient) -> bool:
    """Whether smg has loaded the tokenizer; it reports the worker before it can serve."""
    with contextlib.suppress(httpx.TransportError):
        answer = await client.get("/v1/tokenizers")
        return answer.status_code == 200 and bool(answer.json()["tokenizers"])
    return False


async def test_smg_serves_chats_with_our_tokens(start_cluster: Any) -> None:
    body = {
        "model": "hash",
        "messages": [{"role": "user", "content": "the mat"}],
        "seed": 5,
        "max_tokens": 30,
        "temperature": 1.0,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    async with start_cluster() as cluster, smg_over(cluster) as client:
        theirs = (await client.post("/v1/chat/completions", json=body)).json()
        url = f"{cluster.http_url}/v1/chat/completions"
        ours = (await client.post(url, json=body)).json()
        for answer, expected in zip(theirs["choices"], ours["choices"], strict=True):
            assert answer["message"]["content"] == expected["message"]["content"]
            assert answer["finish_reason"] == expected["finish_reason"]
            scores = [each["logprob"] for each in expected["logprobs"]["content"]]
            told = [each["logprob"] for each in answer["logprobs"]["content"]]
            assert told == pytest.approx(scores[: len(told)])
            assert len(scores) - len(told) <= 1, "it leaves out the end token"
        usage = ("prompt_tokens", "completion_tokens")
        assert [theirs["usage"][name] for name in usage] == [ours["usage"][name] for name in usage]
        refused = await client.post("/v1/chat/completions", json=body | {"max_tokens": 5000})
        assert refused.status_code == 400
        assert "max_tokens=5000" in refused.text


async def test_smg_knows_every_block_that_a_cluster_has(start_cluster: Any) -> None:
    port = free_port()

    async def num_blocks(client: httpx.AsyncClient) -> int:
        page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("smg_kv_index_blocks{")]
        return sum(int(float(line.split()[-1])) for line in lines)

    async with (
        start_cluster(kv_events=True) as cluster,
        smg_over(cluster, "--policy", "cache_aware", metrics_port=port) as client,
    ):
        for number in range(8):
            body = {
                "model": "hash",
                "messages": [{"role": "user", "content": f"{number} the cat sat on the mat"}],
                "max_tokens": 10,
            }
            assert (await client.post("/v1/chat/completions", json=body)).is_success
        blocks = await state(*cluster.groups.values())
        assert len(blocks) == 2, "both groups have some"
        while await num_blocks(client) != len(set().union(*blocks)):
            await asyncio.sleep(0.1)
