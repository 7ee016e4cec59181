"""Truncated prompts: the answer is that to the last tokens alone."""

from typing import Any

import httpx
import pytest

from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

TEXT = "the cat sat on the mat. " * 400


async def test_both_protocols_answer_what_is_kept(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        ids = cluster.gateway.tokenizer.encode(TEXT)
        room = (await cluster.gateway.card()).max_model_len

        async def answer(prompt: Any, **fields: Any) -> Any:
            given = {"prompt": prompt, "seed": 5, "max_tokens": 8, "return_token_ids": True}
            url = f"{cluster.http_url}/v1/completions"
            return (await client.post(url, json=given | fields)).json()

        for given, num_kept in [(7, 7), (-1, room - 8)]:
            fields = {"echo": True, "logprobs": 1}
            expected = await answer(ids[-num_kept:], **fields)
            for prompt in (TEXT, ids):
                found = await answer(prompt, truncate_prompt_tokens=given, **fields)
                assert found["choices"] == expected["choices"]
                assert found["usage"]["prompt_tokens"] == num_kept
            params = pb.SamplingParams(seed=5, max_tokens=8, truncate_prompt_tokens=given)
            call = cluster.inference.Generate(pb.GenerateRequest(text=TEXT, sampling=params))
            tokens = [token async for chunk in call for token in chunk.token_ids]
            assert tokens == expected["choices"][0]["token_ids"]

        chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
        url = f"{cluster.http_url}/v1/chat/completions"
        found = (await client.post(url, json=chat | {"truncate_prompt_tokens": 9})).json()
        assert found["usage"]["prompt_tokens"] == 9
        for given, word in [(0, "-1, or 1 or more"), (room + 1, f"max_model_len, which is {room}")]:
            refused = await answer(TEXT, truncate_prompt_tokens=given)
            assert word in refused["error"]["message"]
