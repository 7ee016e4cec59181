"""What `bench.gpu.run` measures on: models, cases, and the small ones of a dry run on a CPU."""

from dataclasses import dataclass
from typing import Any

import torch
from bench.kernels import CPU_SHAPE, GPU_CASES, GPU_SHAPE, Case, Shape

SHAPES = {
    "32:8 heads of 128": GPU_SHAPE,
    "24:8 heads of 64": Shape(num_heads=24, num_kv_heads=8, head_size=64),
}
DRY_CASES = [
    Case(name="decode 4 x 40", rows=[(40, 1)] * 4),
    Case(name="prefill 30", rows=[(30, 30)]),
]

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


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a run is."""

    device: torch.device
    is_dry: bool
    """On a CPU, of everything a little: it shows that the script works, and nothing else."""
    cases: list[Case]

    @property
    def budget_s(self) -> float:
        """For the calls of one timing."""
        return 0.01 if self.is_dry else 0.5

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"12:4 heads of 64": CPU_SHAPE} if self.is_dry else SHAPES

    @property
    def llama(self) -> dict[str, Any]:
        return TINY if self.is_dry else LLAMA_8B

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return (1, 3) if self.is_dry else (1, 32, 256)

    @property
    def context(self) -> int:
        """Tokens before the decodes of the model."""
        return 40 if self.is_dry else 1024


def dry_scale() -> Scale:
    return Scale(device=torch.device("cpu"), is_dry=True, cases=DRY_CASES)


def full_scale(*, is_quick: bool) -> Scale:
    cases = GPU_CASES[2:8:2] if is_quick else GPU_CASES
    return Scale(device=torch.device("cuda"), is_dry=False, cases=cases)
