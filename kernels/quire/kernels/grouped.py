"""4-bit weights with a scale per group of inputs, as in GPTQ, AWQ and compressed-tensors
checkpoints. `round_to_groups` quantises other weights to them."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# O, I a linear layer's output and input   G groups of inputs   L inputs in a group   N any groups

ZERO = 8
"""The code of 0 in symmetric weights."""
LINE = 8
"""Inputs that a kernel processes at once; the size of a group is a multiple of it."""
_GROUP = 32
"""Inputs that share a scale in weights that `round_to_groups` makes, unless parts are smaller."""

_FACTORS = (1.08, 1.04, 1.0, 0.96, 0.92, 0.88, 0.84)
"""Factors tried on the scale that exactly covers a group's extreme value."""
_LEAST_SCALE = 1e-30
"""Below this scale a quotient could overflow, so the group becomes zeros."""
_CHUNK = 1 << 17
"""Values rounded at once, so that they stay in the level-2 cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedWeight:
    """A matrix ``[O, I]`` with the values ``scale * (code - zero)``."""

    code_OI: Tensor
    """uint8, 0 to 15."""
    scale_OG: Tensor
    """float32; I is a multiple of G."""
    zero_OG: Tensor | None
    """uint8, 0 to 16; ``None`` means `ZERO` everywhere."""
    dtype: torch.dtype
    """The type of the inputs that the matrix is multiplied with."""

    @property
    def shape(self) -> torch.Size:
        return self.code_OI.shape

    @property
    def group(self) -> int:
        """Inputs per group, L."""
        return self.shape[1] // self.scale_OG.shape[1]

    def decode(self) -> Tensor:
        """The dequantised matrix, each value rounded to `dtype` once."""
        zero_OG1 = ZERO if self.zero_OG is None else self.zero_OG[..., None].float()
        code_OGL = self.code_OI.reshape(*self.scale_OG.shape, self.group)
        levels_OGL = code_OGL.float() - zero_OG1
        return (levels_OGL * self.scale_OG[..., None]).flatten(1).to(self.dtype)

    def stored(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Codes, scales and zero points, contiguous in memory."""
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
        """The rows ``index_O``, in that order."""
        zero_OG = self.zero_OG
        return replace(
            self,
            code_OI=self.code_OI[index_O],
            scale_OG=self.scale_OG[index_O],
            zero_OG=None if zero_OG is None else zero_OG[index_O],
        )

    def regrouped(self, divisor: int) -> "GroupedWeight":
        """The same matrix with groups whose size divides ``divisor``."""
        group = math.gcd(self.group, divisor)
        times, zero_OG = self.group // group, self.zero_OG
        return replace(
            self,
            scale_OG=self.scale_OG.repeat_interleave(times, 1),
            zero_OG=None if zero_OG is None else zero_OG.repeat_interleave(times, 1),
        )


def round_to_groups(weight_OI: Tensor, *, num_parts: int = 1) -> GroupedWeight | None:
    """Quantises weights to 4 bits; ``None`` if a part of the input is not a multiple of `LINE`.

    Of several scales, the one with the least squared error is used. A group's result depends on
    that group alone, since sums have a fixed order.
    """
    if weight_OI.shape[1] % (LINE * num_parts):
        return None
    group = math.gcd(_GROUP, weight_OI.shape[1] // num_parts)
    code_OI = torch.empty(weight_OI.shape, dtype=torch.uint8)
    scale_OG = torch.empty(len(weight_OI), weight_OI.shape[1] // group)
    step = max(1, _CHUNK // weight_OI.shape[1])
    for first in range(0, len(weight_OI), step):
        rows = slice(first, first + step)
        values_NL = weight_OI[rows].float().reshape(-1, group)
        code_NL, scale_N = _round(values_NL)
        code_OI[rows] = code_NL.view(-1, weight_OI.shape[1])
        scale_OG[rows] = scale_N.view(-1, scale_OG.shape[1])
    return GroupedWeight(code_OI=code_OI, scale_OG=scale_OG, zero_OG=None, dtype=weight_OI.dtype)


def _round(values_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and scales that are exact in bfloat16."""
    greatest_N, least_N = values_NL.amax(1), values_NL.amin(1)
    # There is one more code below zero than above it.
    extreme_N = torch.where(greatest_N > -least_N, greatest_N, least_N) / -ZERO
    best_NL, best_N, least_error_N = values_NL, extreme_N, torch.full_like(extreme_N, torch.inf)
    for factor in _FACTORS:
        scale_N = (extreme_N * factor).bfloat16().float()
        inverse_N = torch.where(scale_N.abs() > _LEAST_SCALE, 1 / scale_N, 0)
        level_NL = (values_NL * inverse_N[:, None]).round_().clamp_(-ZERO, ZERO - 1)
        error_NL = (level_NL * scale_N[:, None]).sub_(values_NL).square_()
        while error_NL.shape[1] % 2 == 0:
            error_NL = error_NL[:, ::2] + error_NL[:, 1::2]
        error_N = sum(error_NL.unbind(1))
        assert isinstance(error_N, Tensor)
        is_best_N = ~(error_N >= least_error_N)  # NaN stays
        least_error_N = torch.where(is_best_N, error_N, least_error_N)
        best_N = torch.where(is_best_N, scale_N, best_N)
        best_NL = torch.where(is_best_N[:, None], level_NL, best_NL)
    return (best_NL + ZERO).nan_to_num_().byte(), best_N


def stacked(weights: list[Tensor | GroupedWeight]) -> Tensor | GroupedWeight:
    """Concatenates matrices by rows; decodes all if one of them is not grouped."""
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
