"""The model's log-probabilities, before penalties, temperature and top-p.

Each row is computed separately, so that it does not depend on its batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from quire.kernels.native.sampling import score
from quire.worker.request.arrays import Ints, Longs
from quire.worker.request.outputs import TokenLogprobs

# S samples   R of these that want log-probabilities   V vocabulary


def token_logprobs(
    logits_RV: Tensor,
    token_ids_S: Longs,
    num_logprobs_S: Ints,
    *,
    asked: Mapping[int, Sequence[int]] | None = None,
) -> tuple[TokenLogprobs | None, ...]:
    """Log-probabilities of each sample's token and of its most probable ones. Among equals, lower
    ids come first.

    ``logits_RV``: the rows of the samples that request them, or of all. ``num_logprobs_S``: -1 for
    none. ``asked``: by sample, more tokens whose log-probabilities are requested.
    """
    samples = np.flatnonzero(num_logprobs_S >= 0)
    is_all = len(logits_RV) == len(token_ids_S)
    token_ids_R = token_ids_S[samples]
    num_top_R = num_logprobs_S[samples].astype(np.int64)
    rows_R = samples if is_all else np.arange(len(samples))
    scores = score(
        logits_RV,
        rows_R=rows_R,
        token_ids_R=token_ids_R,
        num_top_R=num_top_R,
    )
    found: list[TokenLogprobs | None] = [None] * len(token_ids_S)
    for index, sample in enumerate(samples.tolist()):
        num_top = int(num_top_R[index])
        best = scores.top_ids_RK[index, :num_top].tolist()
        top = tuple(zip(best, scores.top_RK[index, :num_top].tolist(), strict=True))
        if asked is not None and sample in asked:
            logits = logits_RV[int(rows_R[index]), list(asked[sample])].double()
            top = with_asked(top, asked[sample], (logits - scores.log_totals_R[index]).tolist())
        found[sample] = TokenLogprobs(
            token_id=int(token_ids_R[index]),
            logprob=float(scores.logprobs_R[index]),
            rank=int(scores.ranks_R[index]),
            top=top,
        )
    return tuple(found)


def with_asked(
    top: tuple[tuple[int, float], ...], asked: Sequence[int], logprobs: Sequence[float]
) -> tuple[tuple[int, float], ...]:
    """``top``, followed by those of ``asked`` that are not in it, once each."""
    return tuple({**dict(top), **dict(zip(asked, logprobs, strict=True))}.items())
