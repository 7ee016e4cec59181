"""Log-probabilities of the model itself: before penalties, temperature and top-p.

Each row is computed by itself, so that it does not depend on its batch.
"""

import numpy as np
from torch import Tensor

from quire.kernels.sampling import score
from quire.worker.api.arrays import Ints, Longs
from quire.worker.api.outputs import TokenLogprobs

# S samples   R of these that want log-probabilities   V vocabulary


def token_logprobs(
    logits_RV: Tensor, token_ids_S: Longs, num_logprobs_S: Ints
) -> tuple[TokenLogprobs | None, ...]:
    """Those of each sample's token and of its most probable ones, lower ids first among equals.

    ``logits``: the rows of the samples that want them, or of all. ``num_logprobs``: -1 for none.
    """
    samples = np.flatnonzero(num_logprobs_S >= 0)
    is_all = len(logits_RV) == len(token_ids_S)
    token_ids_R = token_ids_S[samples]
    num_top_R = num_logprobs_S[samples].astype(np.int64)
    logprobs_R, ranks_R, top_ids_RK, top_RK = score(
        logits_RV,
        rows_R=samples if is_all else np.arange(len(samples)),
        token_ids_R=token_ids_R,
        num_top_R=num_top_R,
    )
    found: list[TokenLogprobs | None] = [None] * len(token_ids_S)
    for index, sample in enumerate(samples.tolist()):
        num_top = int(num_top_R[index])
        top = zip(
            top_ids_RK[index, :num_top].tolist(), top_RK[index, :num_top].tolist(), strict=True
        )
        found[sample] = TokenLogprobs(
            token_id=int(token_ids_R[index]),
            logprob=float(logprobs_R[index]),
            rank=int(ranks_R[index]),
            top=tuple(top),
        )
    return tuple(found)
