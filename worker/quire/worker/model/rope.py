"""Rotary embedding tables as transformers computes them, and the order of a head's channels."""

import math

import torch
from torch import Tensor

from quire.kernels.ops import RotaryTable
from quire.worker.model.spec import Attention, Rope

# P positions   R half of a head's channels   D a head's channels


def rotary_table(
    rope: Rope | None, num_positions: int, *, head_size: int, device: torch.device
) -> RotaryTable:
    """Cosines and sines ``[num_positions, head_size / 2]`` in float32.

    Channels that are not rotated have a cosine of 1 and a sine of 0.
    """
    half = head_size // 2
    cos_PR, sin_PR = torch.ones(num_positions, half), torch.zeros(num_positions, half)
    if rope is not None:
        positions_P = torch.arange(num_positions, dtype=torch.float32)
        angles_PR = torch.outer(positions_P, _inverse(rope, num_positions))
        cos_PR[:, : rope.size // 2] = angles_PR.cos() * rope.attention_factor
        sin_PR[:, : rope.size // 2] = angles_PR.sin() * rope.attention_factor
    return RotaryTable(cos_PR.to(device), sin_PR.to(device))


def channel_order(rope: Rope | None, head_size: int) -> Tensor | None:
    """The order of a head's channels in which each is rotated with the one half a head later.

    Q and K are reordered alike, so scores do not change. ``None`` if the order stays.
    """
    if rope is None or (rope.size == head_size and not rope.interleaved):
        return None
    channels_D = torch.arange(head_size)
    rotated, others = channels_D[: rope.size], channels_D[rope.size :]
    first, last = (rotated[::2], rotated[1::2]) if rope.interleaved else rotated.chunk(2)
    middle = len(others) // 2
    return torch.cat([first, others[:middle], last, others[middle:]])


def query_scale(attention: Attention, num_positions: int) -> Tensor | None:
    """The factor on queries at each position; ``None`` if it is always 1."""
    if not attention.position_scale or num_positions <= attention.position_period:
        return None
    periods_P = torch.arange(num_positions) // attention.position_period
    return 1 + attention.position_scale * torch.log(1 + periods_P)


def _inverse(rope: Rope, num_positions: int) -> Tensor:
    exponents_R = torch.arange(0, rope.size, 2, dtype=torch.float32) / rope.size
    waves_R = rope.theta**exponents_R
    inverse_R = 1.0 / waves_R
    match rope.kind:
        case "linear":
            return inverse_R / rope.factor
        case "llama3":
            return _stretch_llama3(inverse_R, rope)
        case "yarn":
            return _stretch_yarn(waves_R, rope)
        case "longrope":
            is_long = num_positions > rope.original_max_positions
            factors = rope.long_factors if is_long else rope.short_factors
            return 1.0 / (torch.tensor(factors) * waves_R)
        case _:
            # "dynamic" has no effect within the positions that the model was trained for.
            return inverse_R


def _stretch_llama3(inverse_R: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    turns_R = rope.original_max_positions * inverse_R / (2 * math.pi)
    blend_R = (turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend_R = blend_R.clamp(0, 1)
    return (1 - blend_R) * inverse_R / rope.factor + blend_R * inverse_R


def _stretch_yarn(waves_R: Tensor, rope: Rope) -> Tensor:
    """YaRN (Peng et al. 2023): channels that rotate ``beta_fast`` times or more within the original
    context are kept, those that rotate ``beta_slow`` times or less are stretched."""

    def channel(turns: float) -> float:
        ratio = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    high = high + 0.001 if low == high else high
    kept_R = 1 - ((torch.arange(len(waves_R)) - low) / (high - low)).clamp(0, 1)
    return (1 - kept_R) / (rope.factor * waves_R) + kept_R / waves_R
