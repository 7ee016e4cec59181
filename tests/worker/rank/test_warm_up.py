"""The warm-up compiles every Triton kernel that a serving model launches on a GPU.

Launches with CPU tensors take Triton's own path up to the compiler, which is not called: Triton
reports its cache key for each kernel. A key that the warm-up has not seen would make a request wait
for the compiler. Kernels do not run, so logits are 0 and tokens are drawn at random.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import peft_files
from tests.worker.weights.packers import quantized_copy
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

pytest.importorskip("triton", reason="the kernels need triton to be launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "TRITON_INTERPRET=1 turns the compiler off: run this file in a process without it",
        allow_module_level=True,
    )

import triton
from tools.kernels.captured import Launch, captured
from tools.kernels.compile_cases import shipped_cases

from quire.kernels.batch import Batch
from quire.kernels.ops import KvCache
from quire.kernels.shared_prefix import SharedArrays, find_shared
from quire.kernels.triton import all_reduce as triton_all_reduce
from quire.kernels.triton import logits as triton_logits
from quire.kernels.triton import sample as triton_sample
from quire.kernels.triton.all_reduce import MAX_BYTES, Peers
from quire.kernels.triton.backend import TritonBackend
from quire.kernels.triton.launch import PREFILL_SPLIT_TOKENS, SPLIT_TOKENS
from quire.llm import LLM, LoRARequest, SamplingParams
from quire.worker.blocks.kv_format import Bytes
from quire.worker.model import load
from quire.worker.rank import collectives as tensor_parallel
from quire.worker.rank import runner as model_runner
from quire.worker.rank.gpu_profile import warm_up_steps
from quire.worker.rank.graphs import make_buckets
from quire.worker.rank.sampling.device import DeviceSampler
from quire.worker.rank.staging import pack, packed_bytes, unpack
from quire.worker.rank.symmetric import FixedOrder
from quire.worker.step.messages import StepInput

CAPABILITY = 80
VOCAB_SIZE = 320
Steps = tuple[StepInput, StepInput, StepInput]
ALL_KERNELS = {str(case.kernel.__name__) for case in shipped_cases()}
LOW_RANK = {"shrink_kernel", "expand_kernel"}
ALL_REDUCES = {"all_reduce_kernel", "all_reduce_two_shot_kernel"}
LENGTH = 2 * PREFILL_SPLIT_TOKENS + 300

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.1},
    "log-probabilities": {"logprobs": 3},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
    "bias": {"logit_bias": {5: 1.0}},
    "mask": {"allowed_token_ids": [5, 70]},
    "bans": {"min_tokens": 3, "ignore_eos": False, "stop_token_ids": [9]},
}


class Launches:
    """Records kernel launches, and those whose key was not compiled before."""

    def __init__(self) -> None:
        self._keys: set[tuple[str, str]] = set()
        self._is_serving = False
        self.late: list[str] = []
        """Kernels that would have been compiled while requests waited."""
        self.served: set[str] = set()
        """Kernels that were launched for requests."""

    def serve(self) -> None:
        self._is_serving = True

    def start(self, launch: Launch) -> None:
        assert launch.key is not None
        key = (launch.name, launch.key)
        if self._is_serving:
            self.served.add(launch.name)
            if key not in self._keys:
                self.late.append(launch.name)
        self._keys.add(key)
        for name, value in launch.arguments.items():
            if name in ("out_ptr", "sum_ptr"):
                value.zero_()
        if launch.name == "sample_kernel":
            launch.arguments["token_ids_ptr"].random_(3, VOCAB_SIZE)


class Again:
    """A stand-in for a CUDA graph, whose replay calls the captured function again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.replay = function


class Runner(model_runner.ModelRunner):
    """A runner that takes its CPU for a GPU."""

    launches: Launches

    def __init__(self, config: Any, **parts: Any) -> None:
        num_ranks = parts["tp"].size
        super().__init__(replace(config, tensor_parallel_size=num_ranks), **parts)
        forward = self._model.forward

        def as_on_a_gpu(batch: Batch, kv: KvCache) -> Tensor | None:
            logits_SV = forward(batch, kv)
            return None if logits_SV is None else logits_SV.to(self._dtype)

        self._model.forward = as_on_a_gpu  # type: ignore[method-assign]
        sampler = self._device_sampler = DeviceSampler(self._device)
        sampler._sample, sampler._adjust = triton_sample.sample, triton_logits.adjust_logits
        if not config.enforce_eager:
            self._buckets = make_buckets(
                max_num_seqs=config.max_num_seqs,
                max_model_len=self._max_model_len,
                with_adapters=config.enable_lora,
            )

    def allocate(self, num_blocks: int, host_blocks_XC: Bytes | None = None) -> None:
        super().allocate(num_blocks, host_blocks_XC)
        self.warm_up()
        self.launches.serve()

    def _find_shared(self, step: StepInput, **_: Any) -> SharedArrays | None:
        if not self._sees_all:
            return None
        return find_shared(
            step.block_tables_BM[: step.num_decodes],
            step.seq_lens_B[: step.num_decodes],
            block_size=self._layout.block_size,
            group=self._group,
            min_saved_tokens=1,
        )


class RankOfTwo(tensor_parallel.TensorParallel):
    """Rank 0 of two, with kernels that do not run."""

    size = 2

    def __init__(self) -> None:
        ints = torch.zeros(1024, dtype=torch.int32)
        longs = torch.zeros(2, dtype=torch.int64)
        peers = Peers(rank=0, size=2, buffers_R=longs, flags_R=longs, epochs_P=ints)
        self._fixed_order = FixedOrder.__new__(FixedOrder)
        self._fixed_order._kernel = triton_all_reduce
        self._fixed_order._small = self._fixed_order._large = peers

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._fixed_order.all_reduce(x) if self._fixed_order.takes(x) else x

    def _gather(self, x: Tensor) -> list[Tensor]:
        return [x, x]


def stage_as_on_a_gpu(arrays: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Stages inputs in one buffer, so that tensors have the same alignment as on a GPU."""
    buffer = torch.empty(packed_bytes(arrays), dtype=torch.uint8)
    pack(arrays, buffer)
    return list(unpack(arrays, buffer))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    noted = Launches()
    monkeypatch.setattr(Runner, "launches", noted, raising=False)
    monkeypatch.setattr(model_runner, "ModelRunner", Runner)
    monkeypatch.setattr(model_runner, "pick_device", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(load, "backend_for", lambda *_, **__: TritonBackend())
    monkeypatch.setattr(model_runner, "CudaCapture", lambda: Again)
    for module in ("rank.runner", "rank.graphs", "rank.sampling.device"):
        monkeypatch.setattr(f"quire.worker.{module}.stage", stage_as_on_a_gpu)
    with captured(CAPABILITY, noted.start, compiles=False):
        yield noted


def serve(path: Path, *, adapters: Sequence[LoRARequest] = (), **settings: Any) -> None:
    """Serves every kind of sampling in batches of every size, and prompts that are chunked, long or
    share a prefix. With ``adapters``, each without and with them."""
    options: Any = {
        "dtype": "bfloat16", "max_num_seqs": 4, "num_blocks": 4 * LENGTH // 16, "num_threads": 1,
        "max_num_batched_tokens": 2048, "async_scheduling": True,
    } | settings  # fmt: skip
    with LLM(path, **options) as llm:
        longest = min(llm.engine.max_model_len, LENGTH) - 40

        def generate(prompts: list[list[int]], *samplings: dict[str, Any]) -> None:
            params = [
                SamplingParams(**{"max_tokens": 4, "ignore_eos": True} | sampling)
                for sampling in samplings
            ]
            several = [*adapters, None]
            asked = [several[number % len(several)] for number in range(len(prompts))]
            for lora_request in (None, asked) if adapters else (None,):
                llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts],
                    params if len(params) == len(prompts) else params[0],
                    use_tqdm=False,
                    lora_request=lora_request,
                )

        long = [3 + number % 300 for number in range(longest)]
        stem = long[: 2 * SPLIT_TOKENS + 3]
        for sampling in SAMPLINGS.values():
            generate([[7, 8, 9]], sampling)
        for num_rows in range(1, options["max_num_seqs"] + 2):
            generate([[9 + row] * (1 + 7 * row) for row in range(num_rows)], {})
            generate([[*stem, 9 + row] for row in range(num_rows)], SAMPLINGS["penalties"])
        generate([[5, row] for row in range(len(SAMPLINGS))], *SAMPLINGS.values())
        generate([long, [4], long[:50]], {})
        generate([[*long, 6]], {})
        generate([[*long[:-100], 6], [*long[:-30], 6], [5]], {"max_tokens": 30})


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in graphs": ({}, {}),
    "call by call": ({}, {"enforce_eager": True, "async_scheduling": False}),
    "one row": ({}, {"max_num_seqs": 1}),
    "one row, call by call": ({}, {"max_num_seqs": 1, "enforce_eager": True}),
    "small chunks": ({}, {"max_num_batched_tokens": 70}),
    "float8": ({}, {"kv_cache_dtype": "fp8"}),
    "float32": ({}, {"dtype": "float32"}),
    "odd sizes": (
        {
            "vocab_size": 331,
            "hidden_size": 72,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 80,
        },
        {},
    ),
    "window": ({"sliding_window": 100}, {}),
    "short context": ({"max_position_embeddings": 64}, {}),
    "many heads, large blocks": (
        {"num_attention_heads": 64, "num_key_value_heads": 16, "head_dim": 16},
        {"block_size": 128},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_while_it_serves(
    case: str, launches: Launches, make_llama: Callable[..., Path]
) -> None:
    shape, settings = CASES[case]
    serve(model(make_llama, **shape), **settings)
    assert launches.late == []
    if case == "in graphs":
        others = {"write_kernel", "wide_norm_kernel", "experts_kernel", "grouped_kernel"}
        others |= LOW_RANK
        assert launches.served == ALL_KERNELS - others - ALL_REDUCES


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True, "async_scheduling": False}])
def test_adapters_are_compiled_before_they_are_served(
    settings: dict[str, Any], launches: Launches, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    path = model(make_llama)
    weights = LlamaForCausalLM.from_pretrained(path)
    folders = [
        peft_files.write(tmp_path / "small", weights, seed=1, rank=3),
        peft_files.write(tmp_path / "other", weights, seed=2, targets=peft_files.ATTENTION),
    ]
    adapters = [LoRARequest(folder.name, 1, str(folder)) for folder in folders]
    serve(path, adapters=adapters, enable_lora=True, max_loras=3, **settings)
    assert launches.late == []
    assert launches.served >= LOW_RANK


@pytest.mark.slow
def test_products_of_experts_are_compiled_before_they_are_served(
    launches: Launches, tmp_path: Path
) -> None:
    config = Qwen2MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=48,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path)
    serve(tmp_path)
    assert launches.late == []
    assert "experts_kernel" in launches.served


@pytest.mark.slow
def test_products_of_4_bits_are_compiled_before_they_are_served(
    launches: Launches, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    packed, _ = quantized_copy(model(make_llama), tmp_path, "packed-asym")
    serve(packed)
    assert launches.late == []
    assert "grouped_kernel" in launches.served


@pytest.mark.slow
def test_nothing_is_compiled_while_a_rank_of_two_serves(
    launches: Launches, make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full chunk of this model is too large for the one-shot all-reduce; decodes are not."""
    monkeypatch.setattr(tensor_parallel, "TensorParallel", RankOfTwo)
    hidden_size = 128
    assert 2048 * 2 * hidden_size > MAX_BYTES
    serve(model(make_llama, hidden_size=hidden_size), enforce_eager=True)
    assert launches.late == []
    assert launches.served >= ALL_REDUCES


def without_adjustments(steps: Steps) -> Steps:
    mixed, behind, decodes = steps
    return mixed, behind, replace(decodes, sampling=mixed.sampling)


def without_sharing(steps: Steps) -> Steps:
    mixed, behind, decodes = steps
    return mixed, behind, replace(decodes, seq_lens_B=np.ones_like(decodes.seq_lens_B))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "kernels"),
    [
        (
            without_adjustments,
            {"bias_kernel", "adjust_kernel", "mask_kernel", "sample_kernel"},
        ),
        (without_sharing, {"decode_kernel", "shared_kernel"}),
        (lambda steps: (steps[0], steps[0], steps[2]), {"prefill_kernel", "prefill_merge_kernel"}),
        (lambda steps: (steps[1], steps[1], steps[2]), {"prefill_kernel"}),
    ],
    ids=["adjustments", "sharing", "a chunk far behind", "a chunk"],
)
def test_a_step_left_out_of_the_warm_up_is_noticed(
    left_out: Callable[[Steps], Steps], kernels: set[str], launches: Launches,
    make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(
        model_runner, "warm_up_steps", lambda *args, **kw: left_out(warm_up_steps(*args, **kw))
    )
    serve(model(make_llama), enforce_eager=True)
    assert set(launches.late) == kernels


@pytest.mark.slow
def test_an_argument_that_changes_and_is_specialised_is_noticed(
    launches: Launches, make_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = triton_logits.adjust_kernel
    monkeypatch.setattr(triton_logits, "adjust_kernel", triton.jit(kernel.fn))
    serve(model(make_llama))
    assert set(launches.late) == {"adjust_kernel"}


def model(make_llama: Callable[..., Path], **shape: Any) -> Path:
    fields = {"num_hidden_layers": 1, "max_position_embeddings": 8192} | shape
    if (window := fields.pop("sliding_window", None)) is None:
        return make_llama("one-layer", **fields)
    path = make_llama("one-layer", **fields)
    file = path / "config.json"
    changed = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return path
