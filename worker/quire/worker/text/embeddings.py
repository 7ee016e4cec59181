"""Embeddings of the offline API, and prompts for pairs of texts."""

from collections.abc import Sequence

import numpy as np

from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.arrays import Floats
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    TokenDelta,
)
from quire.worker.request.request import Prepared, Prompt, Text, Tokens
from quire.worker.text.tokenizer import Tokenizer


class OfflineEmbedding:
    """The embedding of one prompt, in progress until the engine has returned its vector."""

    def __init__(self, request: Prepared) -> None:
        self.request = request
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.vector_C: Floats = np.empty(0, np.float32)

    def receive(self, delta: TokenDelta) -> None:
        """Stores the vector.

        Raises:
            BrokenLogits: The model's values were NaN or infinite.
        """
        if delta.error is not None:
            raise delta.error
        assert delta.hidden is not None
        self.vector_C = delta.hidden[0]
        self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason = delta.finish_reason

    def output(self) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(
            request_id=self.request.request_id,
            outputs=EmbeddingOutput(embedding=self.vector_C.tolist()),
            prompt_token_ids=self.request.prompt_token_ids.tolist(),
            num_cached_tokens=self.num_cached_tokens,
        )


def pair_prompt(first: str, second: str | Tokens, tokenizer: Tokenizer) -> Prompt:
    """The prompt of two texts, for a model that scores pairs."""
    before, between, behind = tokenizer.around_pair
    return (
        Tokens(before),
        Text(first, add_special_tokens=False),
        Tokens(between),
        Text(second, add_special_tokens=False) if isinstance(second, str) else second,
        Tokens(behind),
    )


def pair_token_ids(first: str, second: str, tokenizer: Tokenizer) -> list[int]:
    """The token ids of `pair_prompt`. Raises InvalidRequest, as `check_pair` does."""
    before, between, behind = tokenizer.around_pair
    texts = (tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
    token_ids = [*before, *next(texts), *between, *next(texts), *behind]
    check_pair(token_ids, tokenizer)
    return token_ids


def check_pair(token_ids: Sequence[int] | TokenIds, tokenizer: Tokenizer) -> None:
    """Raises InvalidRequest if the model cannot tell where the second text of a pair begins."""
    _, between, behind = tokenizer.around_pair
    if not between:
        return
    separator = between[0]
    has, wants = (np.array(ids) == separator for ids in (token_ids, [*between, *behind]))
    if has.sum() != wants.sum():
        raise InvalidRequest(
            f"the pair has token {separator} in {has.sum()} places and not {wants.sum()}: a text "
            "may not have the model's separator, nor be cut so far that none of the second is left"
        )
