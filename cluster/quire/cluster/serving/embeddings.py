"""Computes embeddings and rankings on a model's groups, for both HTTP and gRPC."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.cluster.failover.chunk import Chunk
from quire.cluster.serving.service import ModelService
from quire.worker.api.arrays import Floats
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.request import Chat, Prepared, Prompt, Request, Task, Text
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.api.scoring import LogitScore, PairScore, Scoring, logistic
from quire.worker.text.embeddings import check_pair, cosine, normalized, pair_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The number of prompt tokens, and of those whose KV was cached."""

    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, costs: "Iterable[Cost]") -> "Cost":
        """The sum of ``costs``."""
        listed = list(costs)
        return cls(
            num_prompt_tokens=sum(each.num_prompt_tokens for each in listed),
            num_cached_tokens=sum(each.num_cached_tokens for each in listed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded(Cost):
    """One input's embedding, C numbers, and its cost."""

    vector_C: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A client's options: the fields of `Request` that are the same for each of its inputs."""

    truncate_prompt_tokens: int | None = None
    tenant: str = ""
    key_name: str = ""
    cache_salt: str = ""
    priority: int = 0
    timeout_s: float | None = None
    client_id: str = ""

    def embedding(self, prompt: Prompt) -> Request:
        """The request for a prompt's embedding. Raises InvalidRequest: a value is out of range."""
        sampling = SamplingParams(
            temperature=0, max_tokens=1, truncate_prompt_tokens=self.truncate_prompt_tokens
        )
        return self._request(prompt, sampling, task="embed")

    def score(self, query: str, document: str, scoring: LogitScore) -> Request:
        """The request for one document's score. Raises InvalidRequest: a value is out of range."""
        if self.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                f"truncate_prompt_tokens={self.truncate_prompt_tokens} is not supported for this "
                "model, whose chat template writes something behind a document: send shorter ones",
                param="truncate_prompt_tokens",
            )
        roles = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=0,
            logprob_token_ids=(scoring.true_token_id, scoring.false_token_id),
        )
        chat = Chat(roles, add_generation_prompt=scoring.add_generation_prompt)
        return self._request((chat,), sampling, task="generate")

    def _request(self, prompt: Prompt, sampling: SamplingParams, *, task: Task) -> Request:
        return Request(
            prompt=prompt,
            task=task,
            sampling=sampling,
            tenant=self.tenant,
            key_name=self.key_name,
            cache_salt=self.cache_salt,
            priority=self.priority,
            timeout_s=self.timeout_s,
            client_id=self.client_id,
        )


async def embed(
    model: ModelService, prompts: Sequence[Prompt], ask: Ask, *, dimensions: int | None = None
) -> list[Embedded]:
    """The embeddings of ``prompts``, in order. With ``dimensions``, only as many first numbers of
    each, normalized again, for models trained for that (Matryoshka, Kusupati et al. 2022).

    Raises:
        InvalidRequest: The model makes no embeddings, an input cannot be served, or ``dimensions``
            exceed the embeddings' length.
        And whatever `ModelService.prepare` and `ModelService.run` raise.
    """
    if isinstance(model.scoring, PairScore):
        raise InvalidRequest(
            "this model scores pairs of texts and makes no embeddings: use /v1/rerank or /v1/score",
            param="model",
        )
    if not prompts:
        raise InvalidRequest("input is empty: at least one text", param="input")
    model.check_num_completions(len(prompts))
    prepared = await _prepared(model, [ask.embedding(prompt) for prompt in prompts])
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

    await model.run(prepared, take, shows_output=False)
    return [each for each in found if each is not None]


async def _prepared(model: ModelService, requests: Sequence[Request]) -> list[Prepared]:
    """Prepares ``requests`` one after the other, and yields to the event loop between them. If one
    of several is refused, the message names it."""
    prepared = []
    for place, request in enumerate(requests):
        try:
            prepared.append(await model.prepare(request))
        except InvalidRequest as error:
            if len(requests) > 1:
                error.args = (f"input {place}: {error}",)
            raise
        await asyncio.sleep(0)
    return prepared


async def rank(
    model: ModelService, query: str, documents: Sequence[str], ask: Ask
) -> tuple[list[float], Cost]:
    """Scores how well each of ``documents`` matches ``query``, and the cost: the model's own score
    if it is a reranker, else the cosine of the embeddings. Raises as `embed`."""
    if not documents:
        raise InvalidRequest("documents is empty: at least one text", param="documents")
    if model.scoring is None:
        made = await embed(model, [(Text(query),), *((Text(each),) for each in documents)], ask)
        return [cosine(made[0].vector_C, each.vector_C) for each in made[1:]], Cost.of(made)
    return await _scored(model, model.scoring, [(query, each) for each in documents], ask)


async def score(
    model: ModelService, pairs: Sequence[tuple[str, str]], ask: Ask
) -> tuple[list[float], Cost]:
    """Scores how well the texts of each pair match, as `rank` does, and the cost."""
    if model.scoring is not None:
        return await _scored(model, model.scoring, pairs, ask)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    made = await embed(model, [(Text(each),) for each in texts], ask)
    vectors = {text: each.vector_C for text, each in zip(texts, made, strict=True)}
    return [cosine(vectors[left], vectors[right]) for left, right in pairs], Cost.of(made)


async def _scored(
    model: ModelService, scoring: Scoring, pairs: Sequence[tuple[str, str]], ask: Ask
) -> tuple[list[float], Cost]:
    model.check_num_completions(len(pairs))
    if isinstance(scoring, LogitScore):
        requests = [ask.score(*pair, scoring) for pair in pairs]
    else:
        requests = [ask.embedding(pair_prompt(*pair, model.tokenizer)) for pair in pairs]
    prepared = await _prepared(model, requests)
    if isinstance(scoring, PairScore):
        for each in prepared:
            check_pair(each.prompt_token_ids, model.tokenizer)
    scores, costs = [0.0] * len(pairs), []

    async def take(chunk: Chunk) -> None:
        if chunk.embedding is not None and isinstance(scoring, PairScore):
            scores[chunk.index] = scoring.of(float(chunk.embedding[0]))
        if isinstance(scoring, LogitScore):
            for each in chunk.logprobs:
                found = dict(each.top) | {each.token_id: each.logprob}
                odds = found[scoring.true_token_id] - found[scoring.false_token_id]
                scores[chunk.index] = logistic(odds)
        if chunk.usage is not None:
            usage = chunk.usage
            costs.append(
                Cost(
                    num_prompt_tokens=usage.num_prompt_tokens,
                    num_cached_tokens=usage.num_cached_tokens,
                )
            )

    await model.run(prepared, take, shows_output=False)
    return scores, Cost.of(costs)


def best(scores: Sequence[float], top_n: int | None) -> list[int]:
    """The indexes of the ``top_n`` highest scores, the highest first. Equal scores keep their
    order; ``None`` or 0 returns all."""
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
