"""The definition of sampling and logits processing, in plain PyTorch: the oracle of their kernels.

It runs on any device. Weights are integers, and the exponential is computed by a fixed polynomial,
because sums and exponentials of devices differ in their last bits, which could change a token.
"""

import math

import torch
from torch import Tensor

# S samples   V vocabulary   A biased and E seen pairs of a sample and a token   K masked samples
# W words of 32 tokens

_SPREAD = -(torch.arange(256, dtype=torch.int32)[:, None] >> torch.arange(8) & 1).int()
"""For each byte, its 8 bits as -1 (set) or 0."""
_MINUS_INFINITY = -(1 << 23)
"""The bits of float32's minus infinity, as an int32."""


def adjust_logits(
    logits_SV: Tensor,
    *,
    biased_rows_A: Tensor,
    biased_ids_A: Tensor,
    bias_A: Tensor,
    seen_rows_E: Tensor,
    seen_ids_E: Tensor,
    seen_counts_E: Tensor,
    presence_S: Tensor,
    frequency_S: Tensor,
    repetition_S: Tensor,
    masked_rows_K: Tensor,
    mask_KW: Tensor,
) -> None:
    """Changes float32 logits in place: bias, then penalties, then masks.

    ``bias`` is added to the logits of its pairs; minus infinity bans a token. A seen pair's token
    occurs in the row's prompt or output, ``seen_counts`` times in its output. The repetition
    penalty (Keskar et al. 2019) divides positive logits of seen tokens and multiplies negative
    ones. The other two penalties are subtracted from logits of output tokens. Bit ``t % 32`` of
    word ``t // 32`` of a mask allows token ``t``; tokens beyond the last word are not allowed. The
    pairs of each kind are distinct. Rows, ids, counts and masks are int32, the others float32.
    """
    logits_SV[biased_rows_A, biased_ids_A] += bias_A
    values_E = logits_SV[seen_rows_E, seen_ids_E]
    repetition_E = repetition_S[seen_rows_E]
    values_E = torch.where(values_E > 0, values_E / repetition_E, values_E * repetition_E)
    lowered_E = frequency_S[seen_rows_E] * seen_counts_E + presence_S[seen_rows_E]
    values_E = torch.where(seen_counts_E > 0, values_E - lowered_E, values_E)
    logits_SV[seen_rows_E, seen_ids_E] = values_E
    for row, mask_W in zip(masked_rows_K.tolist(), mask_KW, strict=True):
        # Works on the bits: selecting between two floats by a mask is eight times as slow.
        spread = _SPREAD.to(mask_W.device).index_select(0, mask_W.view(torch.uint8).int())
        allowed = spread.flatten()[: logits_SV.shape[1]]
        bits = logits_SV[row, : len(allowed)].view(torch.int32)
        bits.bitwise_and_(allowed).bitwise_or_(allowed.bitwise_not_().bitwise_and_(_MINUS_INFINITY))
        logits_SV[row, len(allowed) :] = float("-inf")


def sample(
    logits_SV: Tensor,
    *,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    position_S: Tensor,
) -> Tensor:
    """Draws a token of each row of logits, in float32; int64 ids, the lowest among equals.

    ``temperature``, ``top_p`` and ``min_p`` are float32, ``top_k`` is int32, 0 for no limit,
    ``seed`` and ``position`` are int64. Temperature 0 takes the greatest logit. Otherwise top-k and
    min-p filter the row, then top-p filters the rest. The row's one random number, a hash of
    (seed, position), picks among the remaining tokens, in order of id, by integer weights.
    """
    logits_SV = logits_SV.float()
    token_ids_S = logits_SV.argmax(dim=-1)
    for row in torch.nonzero(temperature_S > 0)[:, 0].tolist():
        token_ids_S[row] = draw_token(
            logits_SV[row],
            temperature=temperature_S[row],
            top_k=int(top_k_S[row]),
            top_p=float(top_p_S[row]),
            min_p=float(min_p_S[row]),
            uniform=random_uniform(int(seed_S[row]), int(position_S[row])),
        )
    return token_ids_S


def draw_token(
    logits_V: Tensor,
    *,
    temperature: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
) -> int:
    """The token that ``uniform``, in [0, 1), picks from one row; see `sample`."""
    values_V, ids_V = logits_V.sort(descending=True, stable=True)
    log_min_p = math.log(min_p) if min_p > 0 else -math.inf
    floor = float(values_V[0]) + float(temperature) * log_min_p
    size = min(top_k or len(ids_V), int((values_V.double() >= floor).sum()))
    weights_V = sampling_weights(values_V[:size], temperature=temperature)
    before_V = weights_V.cumsum(0) - weights_V
    if top_p < 1:
        wanted = top_p * int(weights_V.sum())
        weights_V = weights_V[before_V.double() < wanted]  # int64 with a float gives float32
    kept_V = torch.zeros_like(logits_V, dtype=torch.int64)
    kept_V[ids_V[: len(weights_V)]] = weights_V
    total = int(kept_V.sum())
    target = min(int(uniform * total), total - 1)
    return int(torch.searchsorted(kept_V.cumsum(0), target, right=True))


def sampling_weights(logits_V: Tensor, *, temperature: Tensor) -> Tensor:
    """``floor(2**32 * exp((logit - greatest) / temperature))`` as int64, equal on all devices.

    The exponential is a fixed polynomial, each operation rounded to float32, because the built-in
    ones of devices differ in their last bits.
    """
    # Multiplying takes a tenth of the time of dividing. Zero times infinity would be NaN.
    factor = (1 / (temperature * math.log(2))).clamp_max(torch.finfo(torch.float32).max)
    exponents_V = (logits_V - logits_V.max()) * factor
    exponents_V = exponents_V.clamp_min(-40.0)
    whole_V = (exponents_V + 0.5).floor()
    x_V = exponents_V - whole_V
    power_V = torch.full_like(x_V, _EXP2[0])
    for coefficient in _EXP2[1:]:
        power_V = power_V * x_V
        power_V = power_V + coefficient
    scale_V = ((whole_V.int() + 159) << 23).view(torch.float32)
    return (power_V * scale_V).long()


_EXP2 = (1.32647261e-03, 9.67151299e-03, 5.55073358e-02, 2.40222424e-01, 6.93147004e-01, 1.0)
"""Minimax polynomial of degree 5 for ``2**x`` from -1/2 to 1/2. Its relative error is 9e-8, and
twice that with rounding."""


def random_uniform(seed: int, position: int) -> float:
    """A number in [0, 1), by SplitMix64 (Steele, Lea, Flood 2014) from the hashed seed."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    state = mix((seed + golden) & mask)
    return (mix((state + golden * (position + 1)) & mask) >> 11) * 2.0**-53
