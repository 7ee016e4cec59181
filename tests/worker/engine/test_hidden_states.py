"""Hidden states as outputs of requests, against transformers' own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.worker.engine_requests import request
from transformers import LlamaForCausalLM

from quire.kernels.native import library as native
from quire.worker.group_engine import GroupEngine
from quire.worker.rank.executor import make_executor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prepared

RNG = np.random.default_rng(5)
PROMPTS = {name: RNG.integers(3, 320, length).tolist() for name, length in (("a", 37), ("b", 5))}
OTHERS = [
    request("greedy", PROMPTS["b"], max_tokens=9, temperature=0),
    request("drawn", PROMPTS["a"], max_tokens=9, logprobs=2),
    request("scored", PROMPTS["a"][:20], max_tokens=2, prompt_logprobs=1, logprobs=0),
]


@contextmanager
def engine_of(model: Path, **options: Any) -> Iterator[GroupEngine]:
    config = EngineConfig(
        model=model,
        device="cpu",
        num_blocks=64,
        num_threads=1,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        **options,
    )
    executor, facts = make_executor(config)
    engine = GroupEngine(config, facts, executor)
    yield engine
    engine.close()


def run(
    engine: GroupEngine, *requests: Prepared
) -> tuple[dict[str, list[int]], dict[str, list[npt.NDArray[np.float32]]]]:
    """Runs requests; returns the tokens of each and the hidden states received with them."""
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    hidden: dict[str, list[npt.NDArray[np.float32]]] = {}
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if output.hidden is not None:
                assert len(output.hidden) == len(output.token_ids)
                hidden.setdefault(output.request_id, []).extend(output.hidden)
    return tokens, hidden


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.slow),
        pytest.param({"async_scheduling": True}, id="a step ahead"),
        pytest.param({"speculation": False}, id="without guesses"),
        pytest.param({"model_impl": "transformers"}, id="through transformers"),
        pytest.param({"native": False}, id="operation by operation"),
    ],
)
def test_hidden_states_are_those_of_transformers(
    options: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("native") is False:
        monkeypatch.setattr(native, "library", lambda: None)
        options = {}
    wants = frozenset({"hidden"})
    wanting = [
        request("wants", PROMPTS["a"], max_tokens=6, outputs=wants, temperature=0),
        request("wants and draws", PROMPTS["b"], max_tokens=6, outputs=wants),
        request("scores too", PROMPTS["b"], max_tokens=6, outputs=wants, prompt_logprobs=0),
    ]
    with engine_of(tiny_llama, **options) as engine:
        plain = [replace(each, outputs=frozenset()) for each in wanting]
        expected, nothing = run(engine, *plain, *OTHERS)
        assert not nothing
        for cached in range(2):
            tokens, hidden = run(engine, *wanting, *OTHERS)
            assert tokens == expected
            assert hidden.keys() == {each.request_id for each in wanting}
            if cached:
                assert engine.stats().num_hit_tokens > 0
            _compare(tiny_llama, wanting, tokens, hidden)


def _compare(
    model: Path,
    requests: list[Prepared],
    tokens: dict[str, list[int]],
    hidden: dict[str, list[npt.NDArray[np.float32]]],
) -> None:
    oracle: Any = LlamaForCausalLM.from_pretrained(model, attn_implementation="eager")
    for each in requests:
        prompt, own = each.prompt_token_ids.tolist(), tokens[each.request_id]
        with torch.inference_mode():
            out = oracle.model(input_ids=torch.tensor([prompt + own[:-1]]))
        expected = out.last_hidden_state[0, len(prompt) - 1 :].numpy()
        found = np.stack(hidden[each.request_id])
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_what_an_engine_does_not_do_is_refused(tiny_llama: Path) -> None:
    with engine_of(tiny_llama) as engine:
        wrong: dict[str, Any]
        for wrong, message in (
            ({"task": "rank"}, "task='rank': use 'generate' or 'embed'"),
            ({"outputs": frozenset({"states"})}, r"outputs=frozenset\({'states'}\): use 'hidden'"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                engine.add_request(request("wrong", [3, 4], **wrong))
