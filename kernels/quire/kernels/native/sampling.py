"""Sampling on a CPU: from logits to tokens and log-probabilities, row by row.

`quire.kernels.reference.sampling` defines the results, and computes them without a native library.
"""

from ctypes import byref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native.library import library
from quire.kernels.reference.sampling import adjust_logits as adjust_by_torch
from quire.kernels.reference.sampling import draw_token

# S rows of logits   R of these   V vocabulary   K tokens of the longest list asked for

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def adjust_logits(
    logits_SV: Tensor, *, masked_rows_K: Tensor, mask_KW: Tensor, **others: Tensor
) -> None:
    """`reference_sampling.adjust_logits`, with the masks applied by the native library."""
    native = library()
    if native is None or not len(masked_rows_K) or logits_SV.stride(1) != 1:
        adjust_by_torch(logits_SV, masked_rows_K=masked_rows_K, mask_KW=mask_KW, **others)
        return
    if len(others["biased_rows_A"]) or len(others["seen_rows_E"]):
        adjust_by_torch(logits_SV, masked_rows_K=masked_rows_K[:0], mask_KW=mask_KW[:0], **others)
    masked_rows_K, mask_KW = masked_rows_K.contiguous(), mask_KW.contiguous()
    arguments = native_abi.MaskArgs(
        logits=logits_SV.data_ptr(),
        stride=logits_SV.stride(0),
        num_columns=logits_SV.shape[1],
        rows=masked_rows_K.data_ptr(),
        num_rows=len(masked_rows_K),
        masks=mask_KW.data_ptr(),
        num_words=mask_KW.shape[1],
    )
    native.quire_mask(byref(arguments), torch.get_num_threads())


def draw(
    logits_SV: Tensor,
    *,
    rows_R: Longs,
    temperature_R: npt.NDArray[np.float32],
    top_k_R: Longs,
    top_p_R: Doubles,
    min_p_R: Doubles,
    uniform_R: Doubles,
) -> Longs:
    """Draws a token from each of the rows ``rows_R`` of float32 logits, at temperatures above 0.

    ``top_k`` 0 and ``min_p`` 0 set no limit; ``uniform`` is in [0, 1). The result is -1 for a row
    whose greatest logit is infinite or NaN.
    """
    native = library()
    if native is None:
        return np.array(
            [
                _drawn(logits_SV[row], *each)
                for row, *each in zip(
                    rows_R.tolist(),
                    torch.from_numpy(temperature_R),
                    top_k_R.tolist(),
                    top_p_R.tolist(),
                    min_p_R.tolist(),
                    uniform_R.tolist(),
                    strict=True,
                )
            ],
            np.int64,
        )
    logits_SV = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
    with np.errstate(divide="ignore"):
        log_min_p_R = np.log(min_p_R)
    arrays: dict[str, npt.NDArray[Any]] = {
        "rows": np.ascontiguousarray(rows_R, np.int64),
        "temperature": np.ascontiguousarray(temperature_R, np.float32),
        "top_k": np.ascontiguousarray(top_k_R, np.int64),
        "top_p": np.ascontiguousarray(top_p_R, np.float64),
        "log_min_p": log_min_p_R,
        "uniform": np.ascontiguousarray(uniform_R, np.float64),
    }
    out_R = np.empty(len(rows_R), np.int64)
    arguments = native_abi.SampleArgs(
        logits=logits_SV.data_ptr(),
        stride=logits_SV.stride(0),
        num_columns=logits_SV.shape[1],
        num_rows=len(rows_R),
        out=out_R.ctypes.data,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    native.quire_sample(byref(arguments), torch.get_num_threads())
    return out_R


def _drawn(
    logits_V: Tensor, temperature: Tensor, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    if not bool(logits_V.max().isfinite()):
        return -1
    return draw_token(
        logits_V,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniform=uniform,
    )


class Scores(NamedTuple):
    logprobs_R: Doubles
    ranks_R: Longs
    top_ids_RK: Longs
    """Ids of the best tokens; among equal logits the lower id comes first."""
    top_RK: Doubles
    """Log-probabilities of the best tokens."""
    log_totals_R: Doubles
    """Log of the sum of exponentials: a log-probability is a logit minus this."""


def score(logits_SV: Tensor, *, rows_R: Longs, token_ids_R: Longs, num_top_R: Longs) -> Scores:
    """Scores a token of each of the rows ``rows_R`` of float32 logits, and the row's best tokens.

    Only the first ``num_top`` entries of a row's lists are valid. A rank is 1 more than the number
    of more probable tokens. Log-probabilities are NaN if the greatest logit is infinite or NaN.
    """
    num_rows = len(rows_R)
    max_top = min(int(num_top_R.max(initial=0)), logits_SV.shape[1])
    logprobs_R, ranks_R = np.empty(num_rows), np.empty(num_rows, np.int64)
    top_ids_RK = np.zeros((num_rows, max_top), np.int64)
    top_RK = np.zeros((num_rows, max_top))
    log_totals_R = np.empty(num_rows)
    scores = Scores(logprobs_R, ranks_R, top_ids_RK, top_RK, log_totals_R)
    native = library()
    if native is None:
        for index, (row, token_id, num_top) in enumerate(
            zip(rows_R.tolist(), token_ids_R.tolist(), num_top_R.tolist(), strict=True)
        ):
            logits_V = logits_SV[row].double()
            log_totals_R[index] = float(logits_V.logsumexp(dim=0))
            # Ranked by logits, since different logits can round to one log-probability.
            values_V = logits_V.numpy()
            logprobs_V = values_V - log_totals_R[index]
            logprobs_R[index] = logprobs_V[token_id]
            ranks_R[index] = 1 + (values_V > values_V[token_id]).sum()
            best = np.argsort(-values_V, kind="stable")[: min(num_top, max_top)]
            top_ids_RK[index, : len(best)], top_RK[index, : len(best)] = best, logprobs_V[best]
        return scores
    logits_SV = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
    arrays = {
        "rows": np.ascontiguousarray(rows_R, np.int64),
        "token_ids": np.ascontiguousarray(token_ids_R, np.int64),
        "num_top": np.ascontiguousarray(num_top_R, np.int64),
        "logprobs": logprobs_R,
        "ranks": ranks_R,
        "top_ids": top_ids_RK,
        "top_logprobs": top_RK,
        "log_totals": log_totals_R,
    }
    arguments = native_abi.ScoreArgs(
        logits=logits_SV.data_ptr(),
        stride=logits_SV.stride(0),
        num_columns=logits_SV.shape[1],
        num_rows=num_rows,
        max_top=max_top,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    native.quire_score(byref(arguments), torch.get_num_threads())
    return scores
