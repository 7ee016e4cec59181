"""Weights of 4 bits with a scale for each group of inputs: what GPTQ, AWQ and compressed-tensors
checkpoints hold, and what `round_to_groups` makes of others."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# O, I a linear layer's output and input   G groups of inputs   L inputs in a group

ZERO = 8
"""The code of 0 in symmetric weights."""
LINE = 8
"""Inputs that a kernel takes at once: groups are multiples of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedWeight:
    """A matrix ``[O, I]`` whose values are ``scale * (code - zero)``, in one type."""

    code_OI: Tensor
    """uint8, 0 to 15."""
    scale_OG: Tensor
    """float32; I is a multiple of G."""
    zero_OG: Tensor | None
    """uint8, 0 to 16; ``None`` is `ZERO` everywhere."""
    dtype: torch.dtype
    """Of what it is multiplied with."""

    @property
    def shape(self) -> torch.Size:
        return self.code_OI.shape

    @property
    def group(self) -> int:
        """L."""
        return self.shape[1] // self.scale_OG.shape[1]

    def decode(self) -> Tensor:
        """The matrix, each value rounded to `dtype` once."""
        zero_OG1 = ZERO if self.zero_OG is None else self.zero_OG[..., None].float()
        code_OGL = self.code_OI.reshape(*self.scale_OG.shape, self.group)
        levels_OGL = code_OGL.float() - zero_OG1
        return (levels_OGL * self.scale_OG[..., None]).flatten(1).to(self.dtype)

    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zero points, row by row in memory."""
        zero_OG = None if self.zero_OG is None else self.zero_OG.contiguous()
        return self.code_OI.contiguous(), self.scale_OG.contiguous(), zero_OG

    def to(self, device: torch.device) -> "GroupedWeight":
        return replace(
            self,
            code_OI=self.code_OI.to(device),
            scale_OG=self.scale_OG.to(device),
            zero_OG=None if self.zero_OG is None else self.zero_OG.to(device),
        )

    def __getitem__(self, index_O: Tensor) -> "GroupedWeight":
        """Some rows, in the order of ``index``."""
        zero_OG = self.zero_OG
        return replace(
            self,
            code_OI=self.code_OI[index_O],
            scale_OG=self.scale_OG[index_O],
            zero_OG=None if zero_OG is None else zero_OG[index_O],
        )

    def regrouped(self, divisor: int) -> "GroupedWeight":
        """The same in groups that divide ``divisor`` inputs."""
        group = math.gcd(self.group, divisor)
        times, zero_OG = self.group // group, self.zero_OG
        return replace(
            self,
            scale_OG=self.scale_OG.repeat_interleave(times, 1),
            zero_OG=None if zero_OG is None else zero_OG.repeat_interleave(times, 1),
        )


def stacked(weights: list[Tensor | GroupedWeight]) -> Tensor | GroupedWeight:
    """Matrices one below the other; decoded, where one of them is of no groups."""
    if len(weights) == 1:
        return weights[0]
    grouped = [each for each in weights if isinstance(each, GroupedWeight)]
    if len(grouped) < len(weights):
        return torch.cat([decoded(each) for each in weights])
    group = math.gcd(*(each.group for each in grouped))
    grouped = [each.regrouped(group) for each in grouped]
    has_zeros = any(each.zero_OG is not None for each in grouped)
    return GroupedWeight(
        code_OI=torch.cat([each.code_OI for each in grouped]),
        scale_OG=torch.cat([each.scale_OG for each in grouped]),
        zero_OG=torch.cat([_zeros(each) for each in grouped]) if has_zeros else None,
        dtype=grouped[0].dtype,
    )


def decoded(weight: Tensor | GroupedWeight) -> Tensor:
    return weight.decode() if isinstance(weight, GroupedWeight) else weight


def _zeros(weight: GroupedWeight) -> Tensor:
    if weight.zero_OG is not None:
        return weight.zero_OG
    return torch.full_like(weight.scale_OG, ZERO, dtype=torch.uint8)
