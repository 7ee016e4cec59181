"""Log-probabilities of the model itself: before penalties, temperature and top-p.

Each row is computed by itself, so that it does not depend on its batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.worker.api.outputs import TokenLogprobs

# V vocabulary


def token_logprobs(
    logits_V: Tensor, *, token_id: int, num_top: int, asked: Sequence[int] = ()
) -> TokenLogprobs:
    """Those of ``token_id`` and of the ``num_top`` most probable tokens, lower ids first among
    equals, and of the tokens ``asked``."""
    logits = logits_V.double()
    log_total = torch.logsumexp(logits, dim=0)
    logprobs_V = (logits - log_total).cpu().numpy()
    logprob = logprobs_V[token_id]
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        num_top = min(num_top, len(logprobs_V))
        edge = np.partition(logprobs_V, -num_top)[-num_top]
        ids = np.flatnonzero(logprobs_V >= edge)
        best = ids[np.argsort(-logprobs_V[ids], kind="stable")][:num_top]
        top = tuple((int(token), float(logprobs_V[token])) for token in best)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprob),
        rank=1 + int((logprobs_V > logprob).sum()),
        top=with_asked(top, asked, logprobs_V[list(asked)].tolist()),
    )


def with_asked(
    top: tuple[tuple[int, float], ...], asked: Sequence[int], logprobs: Sequence[float]
) -> tuple[tuple[int, float], ...]:
    """``top``, and behind it those of ``asked`` that are not in it, once each."""
    return tuple({**dict(top), **dict(zip(asked, logprobs, strict=True))}.items())
