"""The engine in nine files: they generate what transformers does, import no part, and are short.

`docs/engine.md` walks through them in this order.
"""

from collections.abc import Iterator

import pytest
import torch
from tests.modules import MODULES, closure, imported_at_start
from tests.prepared import prepared
from transformers import LlamaForCausalLM

from quire import demo_model
from quire.kernels.native import library as native
from quire.kernels.reference.sampling import draw_token, random_uniform
from quire.worker.engine.engine import Engine
from quire.worker.rank.executor import make_executor
from quire.worker.request.config import EngineConfig

NANO = (
    "quire.worker.request.sampling_params",
    "quire.worker.engine.sequence",
    "quire.worker.cache.block_pool",
    "quire.worker.engine.scheduler",
    "quire.worker.engine.step_input",
    "quire.worker.engine.engine",
    "quire.kernels.ops",
    "quire.worker.model.families.llama",
    "quire.kernels.loop",
)
MOST_LINES = 3_000
PROMPTS = ([17, 300, 45, 99, 1021, 7, 7, 340, 12], [17, 300, 45, 99, 1021, 7, 88, 5], [64])
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine without parts, whose rank runs the operations one by one."""
    monkeypatch.setattr(native, "library", lambda: None)
    config = EngineConfig(
        model=demo_model.PATH,
        device="cpu",
        dtype="float32",
        block_size=4,
        max_model_len=64,
        num_blocks=32,
        num_threads=1,
        max_num_seqs=4,
        max_num_batched_tokens=8,
    )
    executor, facts = make_executor(config)
    engine = Engine(config, facts, executor)
    yield engine
    engine.close()


def generate(engine: Engine, **params: float) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        asked = {"max_tokens": NUM_TOKENS, "seed": number, "ignore_eos": True, **params}
        engine.add_request(prepared(str(number), prompt, **asked))
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [outputs[str(number)] for number in range(len(PROMPTS))]


@torch.inference_mode()
def by_transformers(model: LlamaForCausalLM, temperature: float) -> list[list[int]]:
    """Tokens sampled by definition from the logits of whole forward passes, without a cache."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        token_ids = list(prompt)
        for _ in range(NUM_TOKENS):
            logits_V = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            token_ids.append(draw(logits_V, temperature, seed=number, position=len(token_ids)))
        found.append(token_ids[len(prompt) :])
    return found


def draw(logits_V: torch.Tensor, temperature: float, *, seed: int, position: int) -> int:
    if not temperature:
        return int(logits_V.argmax())
    return draw_token(
        logits_V,
        temperature=torch.tensor(temperature),
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        uniform=random_uniform(seed, position),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nine_files_generate_the_tokens_of_transformers(
    engine: Engine, model: LlamaForCausalLM, temperature: float
) -> None:
    expected = by_transformers(model, temperature)
    assert generate(engine, temperature=temperature) == expected
    assert generate(engine, temperature=temperature) == expected
    assert engine.stats().num_hit_tokens > 0


def test_nine_files_are_short_and_import_no_part() -> None:
    assert sum(len(MODULES[name].read_text().splitlines()) for name in NANO) <= MOST_LINES
    imported = closure(NANO, imported_at_start())
    assert not [name for name in imported if name.startswith("quire.worker.parts.")]
