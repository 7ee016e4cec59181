"""The models and cases of `bench.gpu.run`, and smaller ones for a dry run on a CPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench.gpu.cases import CPU_SHAPE, GPU_CASES, GPU_SHAPE, Case, Shape

SHAPES = {
    "32:8 heads of 128": GPU_SHAPE,
    "24:8 heads of 64": Shape(num_heads=24, num_kv_heads=8, head_size=64),
    "64:8 heads of 128": Shape(num_heads=64, num_kv_heads=8, head_size=128),
    "32:8 heads of 128, blocks of 64": Shape(
        num_heads=32, num_kv_heads=8, head_size=128, block_size=64
    ),
    "32:8 heads of 128, blocks of 128": Shape(
        num_heads=32, num_kv_heads=8, head_size=128, block_size=128
    ),
}
DRY_CASES = [
    Case(name="decode 4 x 40", rows=[(40, 1)] * 4),
    Case(name="prefill 30", rows=[(30, 30)]),
]
BLOCK_SIZE = 16
"""Tokens in a block of the model's KV cache."""
SUFFIX = 30
"""New tokens of a prompt whose prefix is cached: the step that prefix caching creates."""

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class DoesNotFit(ValueError):
    """A configuration needs more memory than the device has. Nothing was allocated."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a run is."""

    device: torch.device
    is_dry: bool
    """On a CPU, of everything a little: it shows that the scripts work, and nothing else."""
    cases: list[Case]

    @property
    def budget_s(self) -> float:
        """For the calls of one timing."""
        return 0.01 if self.is_dry else 0.3

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_dry else torch.bfloat16

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"12:4 heads of 64": CPU_SHAPE} if self.is_dry else SHAPES

    @property
    def llama(self) -> dict[str, Any]:
        return TINY if self.is_dry else LLAMA_8B

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """(rows, context) of the model's decode steps."""
        if self.is_dry:
            return [(1, 40), (3, 40)]
        return [(1, 1024), (32, 1024), (256, 1024), (1, 8192), (32, 8192), (1, 65536)]

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """(cached tokens, new tokens) of the model's prefill steps."""
        if self.is_dry:
            return [(0, 24), (40, 6)]
        return [(0, 512), (0, 2048), (0, 8192), (8192, SUFFIX), (65536, SUFFIX), (8192, 2048)]

    @property
    def workload(self) -> tuple[int, int, int]:
        """Requests, prompt tokens and output tokens of the run end to end."""
        return (3, 20, 4) if self.is_dry else (256, 512, 128)

    @property
    def max_model_len(self) -> int:
        longest = max(context for _, context in self.decodes)
        return max(longest, *(cached + new for cached, new in self.prompts)) + BLOCK_SIZE

    @property
    def max_num_seqs(self) -> int:
        return max(*(rows for rows, _ in self.decodes), self.workload[0])

    @property
    def max_num_batched_tokens(self) -> int:
        return max(self.max_num_seqs, *(new for _, new in self.prompts))

    @property
    def num_blocks(self) -> int:
        """KV blocks: as many as the largest step reads, and two a row."""
        requests, prompt, output = self.workload
        steps = [
            *self.decodes,
            *((1, cached + new) for cached, new in self.prompts),
            (requests, prompt + output),
        ]
        return max(rows * (tokens // BLOCK_SIZE + 2) for rows, tokens in steps)


def memory_plan(scale: Scale) -> dict[str, int]:
    """Bytes that the model of ``scale`` will allocate, by kind.

    Activations: the widest of a prefill step, twice, and float32 logits of all sequences.
    """
    model, itemsize = scale.llama, scale.dtype.itemsize
    hidden, mlp = model["hidden_size"], model["intermediate_size"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    head = hidden // heads
    per_layer = hidden * ((2 * heads + 2 * kv_heads) * head + 3 * mlp)
    weights = model["num_hidden_layers"] * per_layer + 2 * model["vocab_size"] * hidden
    block = model["num_hidden_layers"] * 2 * kv_heads * head * BLOCK_SIZE
    wide = max(2 * mlp + mlp, (heads + 2 * kv_heads) * head + 2 * hidden)
    splits = -(-scale.max_model_len // 256)
    parts = max(scale.max_num_seqs * 8, splits) * heads * (head + 2) * 4
    return {
        "weights": weights * itemsize,
        "kv": (scale.num_blocks + 1) * block * itemsize,
        "activations": 2 * scale.max_num_batched_tokens * wide * itemsize,
        "logits": 3 * scale.max_num_seqs * model["vocab_size"] * 4,
        "partial results": 4 * parts,
        "library and graphs": 0 if scale.is_dry else 3 << 30,
    }


def check_fits(scale: Scale, device_bytes: int) -> int:
    """The bytes of `memory_plan` together.

    Raises:
        DoesNotFit: They are more than 97 % of ``device_bytes``.
    """
    plan = memory_plan(scale)
    total = sum(plan.values())
    if total > 0.97 * device_bytes:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items())
        raise DoesNotFit(
            f"the model needs {total / 2**30:.2f} GiB ({parts}), the device has "
            f"{device_bytes / 2**30:.2f}: lower `Scale.decodes` or `Scale.workload`"
        )
    return total


def linear_shapes(scale: Scale) -> Iterator[tuple[str, int, int]]:
    """(name, outputs, inputs) of each linear layer of the model."""
    model = scale.llama
    hidden, mlp = model["hidden_size"], model["intermediate_size"]
    head = hidden // model["num_attention_heads"]
    heads = model["num_attention_heads"] + 2 * model["num_key_value_heads"]
    yield "qkv", heads * head, hidden
    yield "o", hidden, hidden
    yield "gate_up", 2 * mlp, hidden
    yield "down", hidden, mlp
    yield "lm_head", model["vocab_size"], hidden


def dry_scale() -> Scale:
    return Scale(device=torch.device("cpu"), is_dry=True, cases=DRY_CASES)


def full_scale() -> Scale:
    return Scale(device=torch.device("cuda"), is_dry=False, cases=GPU_CASES)
