"""Embeddings and rankings over a model's groups, for the HTTP and the gRPC edge alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.cluster.failover.chunk import Chunk
from quire.cluster.serving.service import ModelService
from quire.worker.api.arrays import Floats
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.request import Prepared, Prompt, Request
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.text.embeddings import cosine, normalized


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """One input's embedding, and what it cost."""

    vector_C: Floats
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client asks for beside its inputs: the fields of `Request` of each of them."""

    truncate_prompt_tokens: int | None = None
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    client_id: str = ""

    def request(self, prompt: Prompt) -> Request:
        """Raises InvalidRequest: a value is out of its range."""
        return Request(
            prompt=prompt,
            task="embed",
            sampling=SamplingParams(
                temperature=0, max_tokens=1, truncate_prompt_tokens=self.truncate_prompt_tokens
            ),
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            priority=self.priority,
            timeout_s=self.timeout_s,
            client_id=self.client_id,
        )


async def embed(
    model: ModelService, prompts: Sequence[Prompt], ask: Ask, *, dimensions: int | None = None
) -> list[Embedded]:
    """The embeddings of ``prompts``, in their order; of their first ``dimensions`` numbers only,
    as models are trained for that allow it (Kusupati et al. 2022).

    Raises:
        InvalidRequest: The model makes no embeddings, an input cannot be served, or ``dimensions``
            are more than there are.
        And what `ModelService.prepare` and `ModelService.run` do.
    """
    if not prompts:
        raise InvalidRequest("input is empty: at least one text", param="input")
    model.check_num_completions(len(prompts))
    prepared = [
        await _prepared(model, ask.request(prompt), place if len(prompts) > 1 else None)
        for place, prompt in enumerate(prompts)
    ]
    found: list[Embedded | None] = [None] * len(prepared)

    async def take(chunk: Chunk) -> None:
        if chunk.embedding is None:
            return
        assert chunk.usage is not None, "an embedding comes with the end"
        found[chunk.index] = Embedded(
            vector_C=_shortened(chunk.embedding, dimensions),
            num_prompt_tokens=chunk.usage.num_prompt_tokens,
            num_cached_tokens=chunk.usage.num_cached_tokens,
        )

    await model.run(prepared, take)
    return [each for each in found if each is not None]


async def _prepared(model: ModelService, request: Request, place: int | None) -> Prepared:
    """``place`` tells the client which of its inputs is refused."""
    try:
        return await model.prepare(request)
    except InvalidRequest as error:
        if place is not None:
            error.args = (f"input {place}: {error}",)
        raise


async def rank(
    model: ModelService, query: Prompt, documents: Sequence[Prompt], ask: Ask
) -> tuple[list[float], list[Embedded]]:
    """How alike each of ``documents`` is to ``query``, and all embeddings, the query's first.
    Raises as `embed`."""
    if not documents:
        raise InvalidRequest("documents is empty: at least one text", param="documents")
    made = await embed(model, [query, *documents], ask)
    return [cosine(made[0].vector_C, each.vector_C) for each in made[1:]], made


def best(scores: Sequence[float], top_n: int | None) -> list[int]:
    """The places of the ``top_n`` greatest scores, the greatest first; of equals, the first."""
    order: list[int] = np.argsort(-np.array(scores), kind="stable").tolist()
    return order if not top_n else order[:top_n]


def _shortened(vector_C: Floats, dimensions: int | None) -> Floats:
    if not dimensions:
        return vector_C
    if dimensions > len(vector_C):
        raise InvalidRequest(
            f"dimensions={dimensions} is out of range: the model's embeddings have {len(vector_C)}",
            param="dimensions",
        )
    return normalized(vector_C[:dimensions])
