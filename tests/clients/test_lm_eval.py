"""The requests of lm-eval's ``local-completions``, replayed.

The answers are parsed as ``parse_logprobs`` of version 0.4.13 parses them.
"""

from typing import Any

import httpx
import pytest
from tests.clients.conftest import SERVED

pytestmark = pytest.mark.anyio

CONTEXT, CHOICES = "the cat sat on", [" the mat", " that", " a"]


async def test_multiple_choice_is_scored_by_echoed_log_probabilities(start_cluster: Any) -> None:
    async with start_cluster(**SERVED) as cluster, httpx.AsyncClient(timeout=None) as client:
        tokenizer = cluster.gateway.tokenizer
        context = tokenizer.encode(CONTEXT)
        ends = [tokenizer.encode(choice, add_special_tokens=False) for choice in CHOICES]
        body = {
            **{"model": "hash", "prompt": [[*context, *end] for end in ends], "temperature": 0},
            **{"max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
        }
        answer = (await client.post(f"{cluster.http_url}/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, end in zip(answer["choices"], ends, strict=True):
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert (
            len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(context) + 1 + len(end)
        )
        scores = told["token_logprobs"][len(context) : -1]
        best = [max(top.values()) for top in told["top_logprobs"][len(context) : -1]]
        assert scores == best == [-0.5] * len(end)  # The hash model's fixed score of every token.


async def test_texts_are_generated_until_a_stop_string(start_cluster: Any, converses: Any) -> None:
    converses("that is that\n\nand that")
    async with start_cluster(**SERVED) as cluster, httpx.AsyncClient(timeout=None) as client:
        body = {
            **{"model": "hash", "prompt": ["the cat<|assistant|>"], "max_tokens": 256},
            **{"temperature": 0, "stop": ["\n\n", "<|end|>"], "seed": 1234},
        }
        answer = (await client.post(f"{cluster.http_url}/v1/completions", json=body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["that is that"]
