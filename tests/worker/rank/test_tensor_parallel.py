"""Tensor-parallel shards add up to the model. Ranks are threads, and collectives plain sums."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire.kernels.native.library import library
from quire.kernels.ops import Embed, GatedLinear, Linear, LinearLayer, Logits, Program
from quire.kernels.torch.cpu import CpuBackend
from quire.kernels.torch.linear import PlainGatedLinear, PlainLinear
from quire.worker.model.config import read_model_spec
from quire.worker.model.program import make_program
from quire.worker.rank.collectives import TensorParallel
from quire.worker.rank.runner import ModelRunner
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import StepInput
from quire.worker.weights.checkpoint import open_checkpoint
from quire.worker.weights.loader import Shard, Weights

CASES = [
    ("tiny_llama", 2),
    ("tiny_llama", 4),  # more ranks than KV heads
    ("tiny_llama_9_3", 3),
    ("tiny_llama_9_3", 9),
    ("tiny_llama_with_biases", 2),
]


class ThreadRank(TensorParallel):
    def __init__(self, rank: int, group: "list[Tensor | None]", barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(group)
        self._group, self._barrier = group, barrier

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._group[self.rank] = x
        self._barrier.wait(timeout=300)
        everything = [part.clone() for part in self._group if part is not None]
        self._barrier.wait(timeout=300)
        return everything

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(dim=0))

    def gather_columns(self, x_SV: Tensor, *, num_columns: int) -> Tensor | None:
        whole = torch.cat(self._exchange(x_SV), dim=1)
        assert whole.shape[1] == num_columns
        return whole if self.rank == 0 else None


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranks_together_compute_what_one_does(
    name: str,
    size: int,
    request: pytest.FixtureRequest,
    config_of: Callable[..., Any],
    runner_of: Any,
    driver: Any,
    row: Any,
) -> None:
    path: Path = request.getfixturevalue(name)
    step = driver.step([row(range(3, 40), [2, 0, 1]), row([5, 9, 1], [4])])
    logits = _run_ranks(config_of(path), size, step)
    torch.testing.assert_close(logits, runner_of(path).forward(step), atol=1e-4, rtol=0)


def _run_ranks(config: EngineConfig, size: int, step: StepInput) -> Tensor:
    group: list[Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    config = replace(config, tensor_parallel_size=size)

    def run(rank: int) -> Tensor | None:
        tp = ThreadRank(rank, group, barrier)
        runner = ModelRunner(config, device=torch.device("cpu"), tp=tp)
        runner.allocate(128)
        return runner.forward(step)

    with ThreadPoolExecutor(size) as pool:
        logits, *others = pool.map(run, range(size))
    assert logits is not None
    assert others == [None] * (size - 1)
    return logits


@pytest.mark.skipif(library() is None, reason="plain PyTorch sums in an order of its own")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_compute_the_bits_of_one(
    dtype: str, tiny_llama: Path, config_of: Callable[..., Any], driver: Any, row: Any
) -> None:
    step = driver.step([row(range(3, 40), [2, 0, 1]), row([5, 9, 1], [4])])
    config = config_of(tiny_llama, dtype=dtype)
    logits = [_run_ranks(config, size, step) for size in (1, 2)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("size", [1, 3])
def test_every_weight_is_on_exactly_one_rank_or_on_all(size: int, tiny_llama_9_3: Path) -> None:
    model = read_model_spec(tiny_llama_9_3)
    checkpoint = open_checkpoint(tiny_llama_9_3)
    stored: dict[str, Tensor] = {}
    for file in checkpoint.files:
        stored |= load_file(file)
    with Weights.open(checkpoint, dtype=torch.float32, device=torch.device("cpu")) as weights:
        shards = [
            make_program(
                model,
                weights,
                shard=Shard(rank=rank, size=size),
                backend=CpuBackend(),
                max_model_len=64,
            )
            for rank in range(size)
        ]
    for index in range(len(model.layers)):
        prefix = f"model.layers.{index}"
        attention = model.layers[index].attention
        q_size = attention.num_heads // size * attention.key_size
        kv_size = attention.num_kv_heads // size * attention.key_size
        qkv, o, gate_up, down = (
            [_weight(shard, f"layers.{index}.{name}") for shard in shards]
            for name in ("qkv", "o", "gate_up", "down")
        )
        q, k, v = zip(*(torch.split(x, [q_size, kv_size, kv_size]) for x in qkv), strict=True)
        gate, up = zip(*(x.chunk(2) for x in gate_up), strict=True)
        for name, whole in {
            "self_attn.q_proj": torch.cat(q),
            "self_attn.k_proj": torch.cat(k),
            "self_attn.v_proj": torch.cat(v),
            "self_attn.o_proj": torch.cat(o, dim=1),
            "mlp.gate_proj": torch.cat(gate),
            "mlp.up_proj": torch.cat(up),
            "mlp.down_proj": torch.cat(down, dim=1),
        }.items():
            assert torch.equal(whole, stored[f"{prefix}.{name}.weight"]), name
    head = torch.cat([_weight(shard, "lm_head") for shard in shards])
    assert torch.equal(head, stored["model.embed_tokens.weight"]), "tied"
    for shard in shards:
        embed = shard[0]
        assert isinstance(embed, Embed)
        assert _weight(shard, "lm_head").untyped_storage().data_ptr() == (
            embed.weight_VC.untyped_storage().data_ptr()
        ), "a tied head takes no memory of its own"


def _weight(program: Program, name: str) -> Tensor:
    linears = [op for op in program if isinstance(op, Linear | GatedLinear | Logits)]
    layers: dict[str, LinearLayer] = {op.name: op.layer for op in linears}
    layer = layers[name]
    plain = layer.gate_up if isinstance(layer, PlainGatedLinear) else layer
    assert isinstance(plain, PlainLinear)
    return plain.weight_OI
