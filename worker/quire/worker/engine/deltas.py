"""Builds an engine's outputs for a sequence: its newest tokens, its vector, or its error."""

import numpy as np

from quire.worker.engine.sequence import Sequence
from quire.worker.model.facts import ModelFacts
from quire.worker.model.steps import make_step
from quire.worker.request.arrays import Floats
from quire.worker.request.errors import BrokenLogits, QuireError
from quire.worker.request.outputs import Fetched, FinishReason, TokenDelta, TokenLogprobs

# C hidden size


class Pooling:
    """Makes the vectors of an embedding model."""

    def __init__(self, model: ModelFacts) -> None:
        self._steps = [make_step(each) for each in model.pooling.steps] if model.pooling else []

    def vector(self, state_C: Floats) -> Floats | None:
        """The embedding for a sequence's hidden state; ``None`` if it is NaN or infinite."""
        for step in self._steps:
            if not np.isfinite(state_C).all():
                return None
            state_C = step(state_C)
        return state_C if np.isfinite(state_C).all() else None


def delta_of(
    seq: Sequence,
    token_ids: tuple[int, ...],
    finish_reason: FinishReason | None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    fetched: Fetched | None = None,
) -> TokenDelta:
    """The output with the newest ``token_ids``. Moves the prompt's log-probabilities that are known
    from ``seq`` into it."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if seq.prompt_logprobs:
        prompt_logprobs, seq.prompt_logprobs = tuple(seq.prompt_logprobs), []
    return TokenDelta(
        seq.request.request_id,
        seq.num_output_tokens - len(token_ids),
        token_ids,
        logprobs,
        finish_reason,
        seq.num_cached or 0,
        prompt_logprobs=prompt_logprobs,
        fetched=fetched,
    )


def failure_of(seq: Sequence, error: QuireError) -> TokenDelta:
    """The output that says that ``seq`` failed with ``error``."""
    request_id, num_output = seq.request.request_id, seq.num_output_tokens
    return TokenDelta(request_id, num_output, (), (), "abort", seq.num_cached or 0, error=error)


def broken_logits(seq: Sequence) -> BrokenLogits:
    num_prompt, num_output = seq.num_prompt_tokens, seq.num_output_tokens
    return BrokenLogits(
        f"the model produced NaN or infinite logits at position {num_prompt + num_output}, "
        f"behind {num_prompt} tokens of prompt and {num_output} of output: its weights are "
        "damaged, or too large for the type it is computed in; other requests are unharmed"
    )
