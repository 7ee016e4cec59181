"""A whole model on the Triton kernels, in Triton's interpreter: its tokens are those of the CPU.

Run as ``TRITON_INTERPRET=1 pytest tests/kernels/interpreted``.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "needs TRITON_INTERPRET=1 in the environment: `make test` runs this folder so",
        allow_module_level=True,
    )
pytest.importorskip("triton", reason="the kernels need triton to be interpreted")

from quire.kernels.shared_prefix import SharedArrays, find_shared
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.launch import SPLIT_TOKENS
from quire.llm import LLM, SamplingParams
from quire.worker.model import load
from quire.worker.rank import runner as model_runner
from quire.worker.rank.graphs import Bucket, DecodeGraphs, make_buckets
from quire.worker.step.messages import StepInput

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [list(range(5, 5 + length)) for length in (1, 9, 30)]


def generate(path: Path) -> list[list[int]]:
    """Generates from prompts in chunks, beside decodes."""
    with LLM(
        path, device="cpu", num_blocks=32, max_model_len=64, num_threads=1, max_num_seqs=3,
        max_num_batched_tokens=24, block_size=4,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Again:
    """A stand-in for a CUDA graph, whose replay calls the captured function again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
def test_a_model_generates_what_it_does_on_a_cpu(
    window: int | None, make_llama: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = make_llama("one-layer", num_hidden_layers=1, max_position_embeddings=64)
    path = Path(shutil.copytree(source, tmp_path / "model"))
    file = path / "config.json"
    changed = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    expected = generate(path)
    monkeypatch.setattr(load, "backend_for", lambda *_, **__: TritonBackend())
    assert generate(path) == expected


@pytest.mark.slow
def test_a_mixture_of_experts_generates_what_it_does_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=48, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    expected = generate(tmp_path)
    monkeypatch.setattr(load, "backend_for", lambda *_, **__: TritonBackend())
    assert generate(tmp_path) == expected


@pytest.mark.slow
def test_decodes_that_share_a_prefix_generate_what_they_do_on_a_cpu(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_llama("one-layer", num_hidden_layers=1)
    stem = [3 + number % 300 for number in range(SPLIT_TOKENS + 3)]
    prompts = [[*stem, 7], [*stem, 8, 9]]

    def generate_both() -> list[list[int]]:
        with LLM(path, device="cpu", num_blocks=64, num_threads=1, max_num_seqs=2) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False
            )
            return [list(output.outputs[0].token_ids) for output in outputs]

    expected = generate_both()
    found = []

    def find(self: model_runner.ModelRunner, step: StepInput) -> SharedArrays | None:
        rows = step.num_decodes
        found.append(
            find_shared(
                step.block_tables_BM[:rows],
                step.seq_lens_B[:rows],
                block_size=16,
                group=2,
                min_saved_tokens=1,
            )
        )
        return found[-1]

    monkeypatch.setattr(load, "backend_for", lambda *_, **__: TritonBackend())
    monkeypatch.setattr(model_runner.ModelRunner, "_find_shared", find)
    assert generate_both() == expected
    assert any(each is not None for each in found)


@pytest.mark.slow
def test_decodes_in_graphs_generate_what_they_do_on_a_cpu(
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_llama("one-layer", num_hidden_layers=1, max_position_embeddings=64)
    expected = generate(path)
    monkeypatch.setattr(load, "backend_for", lambda *_, **__: TritonBackend())
    monkeypatch.setattr(model_runner, "CudaCapture", lambda: Again)
    run, replayed = DecodeGraphs.run, set()

    def noted(self: DecodeGraphs, step: StepInput, bucket: Bucket, late: object) -> Tensor | None:
        replayed.add(bucket.num_rows)
        return run(self, step, bucket, late)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "run", noted)
    init = model_runner.ModelRunner.__init__

    def with_graphs(self: model_runner.ModelRunner, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        self._buckets = make_buckets(max_num_seqs=3, max_model_len=64)

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", with_graphs)
    assert generate(path) == expected
    assert 3 in replayed
