"""A request with NaN logits ends with an error that says so, without effect on other requests."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.prepared import prepared
from tests.steps import banning

from quire.llm import LLM, SamplingParams
from quire.worker.group_engine import GroupEngine
from quire.worker.rank.codec import StepSlots
from quire.worker.rank.executor import make_executor
from quire.worker.rank.sampling.device import DeviceSampler
from quire.worker.rank.sampling.draw import sample
from quire.worker.rank.sampling.head import head_rows, sample_beside
from quire.worker.request.errors import BrokenLogits
from quire.worker.request.outputs import TokenDelta
from quire.worker.step.messages import StepOutput

POISON = 7

Deltas = dict[str, list[TokenDelta]]


@pytest.fixture(scope="module")
def fragile(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of finite weights whose first values overflow for the token `POISON` alone."""
    path = Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("fragile") / "model"))
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 5] = 0
    embedding[POISON] = 0
    embedding[POISON, 5] = 1
    value = tensors["model.layers.0.self_attn.v_proj.weight"]
    value[:, 5] = 3e38
    save_file(tensors, path / "model.safetensors")
    return path


def run(engine: GroupEngine, prompts: dict[str, list[int]], **params: Any) -> Deltas:
    sampling = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 3, **params})
    found: Deltas = {name: [] for name in prompts}
    for name, token_ids in prompts.items():
        engine.add_request(prepared(name, token_ids, sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id].append(delta)
    return found


@pytest.mark.quick_cells("{}-params0", "async_scheduling': True}-params1-1")
@pytest.mark.parametrize("num_others", [1, 7])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1}, {"logprobs": 2}])
@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_size": 2}, {"async_scheduling": True}],
    ids=str,
)
def test_a_request_of_nan_logits_ends_by_name_and_others_go_on(
    fragile: Path,
    config_of: Callable[..., Any],
    settings: dict[str, Any],
    params: dict[str, Any],
    num_others: int,
) -> None:
    others = {f"r{n}": [20 + n, 30, 40] for n in range(num_others)}
    config = config_of(fragile, **settings)
    executor, facts = make_executor(config)
    engine = GroupEngine(config, facts, executor)
    try:
        alone = run(engine, others, **params)
        engine.reset_prefix_cache()
        found = run(engine, others | {"poison": [9, POISON, 11], "also": [POISON]}, **params)
        again = run(engine, others, **params)
        assert engine.stats().num_held_blocks == 0
    finally:
        engine.close()
    for name, num_prompt in (("poison", 3), ("also", 1)):
        (end,) = found.pop(name)
        assert (end.token_ids, end.finish_reason) == ((), "abort")
        assert isinstance(end.error, BrokenLogits)
        assert f"NaN or infinite logits at position {num_prompt}, behind" in str(end.error)

    def tokens(deltas: Deltas) -> dict[str, list[int]]:
        return {name: [t for d in each for t in d.token_ids] for name, each in deltas.items()}

    assert tokens(found) == tokens(again) == tokens(alone)
    assert all(len(each) == 6 for each in tokens(found).values())


def test_the_offline_api_raises_and_works_on(fragile: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(model=fragile, num_blocks=80) as llm:
        prompts = [{"prompt_token_ids": [20, 30]}, {"prompt_token_ids": [POISON]}]
        with pytest.raises(BrokenLogits, match="NaN or infinite logits at position 1, behind 1"):
            llm.generate(prompts, params, use_tqdm=False)
        (output,) = llm.generate(prompts[:1], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("vocab_size", [40, 1000])
@pytest.mark.parametrize("where", ["all", "one"])
def test_the_samplers_name_rows_that_are_nan(vocab_size: int, where: str, driver: Any) -> None:
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(4))
    columns = {
        "temperature": [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "top_p": [1.0, 1.0, 0.9, 0.9, 1.0, 1.0, 0.5, 1.0],
        "top_k": [0, 0, 0, 0, 9, 500, 500, 0],
        "min_p": [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1],
        "num_logprobs": 2,
    }
    batch = driver.sampling(8, **columns)
    on_device = DeviceSampler(torch.device("cpu"))
    assert sample(logits, batch).broken_rows == ()
    assert on_device.sample(logits.clone(), batch).wait().broken_rows == ()
    # A NaN among numbers breaks a row only where tokens are drawn from all logits.
    for broken in range(8) if where == "all" else range(1, 8):
        damaged = logits.clone()
        damaged[broken, slice(None) if where == "all" else slice(3, 4)] = float("nan")
        assert sample(damaged, batch).broken_rows == (broken,)
        if where == "all" and broken == 0:  # The sampling kernel's twin draws from numbers only.
            assert on_device.sample(damaged, batch).wait().broken_rows == (broken,)


def test_a_row_of_banned_tokens_is_not_broken(driver: Any) -> None:
    banned = {0: banning([*range(40)])}
    batch = driver.sampling(1, edits=banned)
    assert sample(torch.zeros(1, 40), batch).broken_rows == ()
    rows = head_rows(batch)
    assert rows is not None
    chosen = torch.zeros(0, 40), np.array([-1])  # As without logits, where none is above -inf.
    assert sample_beside(chosen, batch, rows).broken_rows == ()
    assert sample_beside(chosen, driver.sampling(1), rows).broken_rows == (0,)


def test_broken_rows_cross_between_processes() -> None:
    slots = StepSlots(256)
    for broken_rows in ((), (0, 2)):
        output = StepOutput(np.arange(3), broken_rows=broken_rows)
        arrived = slots.read_output(0, slots.write_output(0, output))
        assert arrived.broken_rows == broken_rows
        assert arrived.token_ids_S.tolist() == [0, 1, 2]
