"""Computes embeddings and rankings on a model's groups, for both HTTP and gRPC."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.service import ModelService
from quire.worker.request.arrays import Floats
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Chat, Prepared, Prompt, Request, Span, Task, Text, Tokens
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.request.scoring import EmbeddingUse, LogitScore, PairScore, Scoring, check_uncut
from quire.worker.request.vectors import normalized, similarity
from quire.worker.text.embeddings import check_pair, pair_prompt

MAX_INPUTS = 2048
"""Most inputs, documents or pairs of one request; OpenAI's limit for embeddings."""


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

    def embedding(self, prompt: Prompt, use: EmbeddingUse | None = None) -> Request:
        """The request for a prompt's embedding. Raises InvalidRequest: a value is out of range."""
        kept = self.truncate_prompt_tokens
        if use is not None:
            prompt = tuple(_rendered(span, use) for span in prompt)
            kept = None if use.is_chat else kept
        sampling = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=kept)
        return self._request(prompt, sampling, task="embed")

    def score(self, query: str, document: str, scoring: LogitScore) -> Request:
        """The request for one document's score. Raises InvalidRequest: a value is out of range."""
        sampling = SamplingParams(
            temperature=0, max_tokens=1, logprobs=0, logprob_token_ids=scoring.token_ids
        )
        chat = Chat(
            scoring.messages(query, document), add_generation_prompt=scoring.add_generation_prompt
        )
        return self._request((chat,), sampling, task="generate")

    def of_documents(self, max_tokens: int | None, *, max_model_len: int) -> "Ask":
        """The same for documents, each of which is cut to ``max_tokens``, and to what the model
        takes."""
        kept = self.truncate_prompt_tokens
        if max_tokens is not None and (kept in (None, -1) or max_tokens < (kept or 0)):
            kept = max_tokens if max_tokens < max_model_len else -1
        return replace(self, truncate_prompt_tokens=kept)

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
    _check_number(len(prompts), "input")
    names = [f"input {place}" for place in range(len(prompts))] if len(prompts) > 1 else [""]
    asks = [(prompt, ask) for prompt in prompts]
    return await _embedded(model, asks, names, dimensions=dimensions)


def _rendered(span: Span, use: EmbeddingUse) -> Span:
    if not isinstance(span, Text):
        return span
    if not use.is_chat:
        return replace(span, text=use.written(span.text))
    return Chat(use.messages(span.text), add_generation_prompt=use.add_generation_prompt)


async def _embedded(
    model: ModelService,
    asks: Sequence[tuple[Prompt, Ask]],
    names: Sequence[str],
    *,
    dimensions: int | None = None,
) -> list[Embedded]:
    """The embedding of each prompt, each with its own options and its name in messages."""
    requests = [ask.embedding(prompt, model.use) for prompt, ask in asks]
    prepared = await _prepared(model, requests, names)
    for name, each, (_, ask) in zip(names, prepared, asks, strict=True):
        with _named(name):
            model.use.check_uncut(len(each.prompt_token_ids), ask.truncate_prompt_tokens)
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


def _check_number(num_inputs: int, name: str) -> None:
    if not num_inputs:
        raise InvalidRequest(f"{name} is empty: at least one text", param=name)
    if num_inputs > MAX_INPUTS:
        raise InvalidRequest(
            f"{name} has {num_inputs} items, at most {MAX_INPUTS} are allowed in one request: "
            "send several",
            param=name,
        )


async def _prepared(
    model: ModelService, requests: Sequence[Request], names: Sequence[str]
) -> list[Prepared]:
    """Prepares ``requests`` one after the other, and yields to the event loop between them. If one
    is refused, the message begins with its name, unless that is empty."""
    prepared = []
    for name, request in zip(names, requests, strict=True):
        with _named(name):
            prepared.append(await model.prepare(request))
        await asyncio.sleep(0)
    return prepared


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts ``name`` before the message of an InvalidRequest."""
    try:
        yield
    except InvalidRequest as error:
        error.args = (f"{name}: {error}" if name else str(error),)
        raise


async def rank(
    model: ModelService,
    query: str,
    documents: Sequence[str],
    ask: Ask,
    *,
    max_tokens_per_doc: int | None = None,
) -> tuple[list[float], Cost]:
    """Scores how well each of ``documents`` matches ``query``, and the cost: the model's own score
    if it is a reranker, else the similarity of the embeddings. Raises as `embed`.

    ``max_tokens_per_doc``: documents, but not the query, are cut to as many tokens.
    """
    _check_number(len(documents), "documents")
    names = [f"document {place}" for place in range(len(documents))]
    card = await model.card()
    cut = ask.of_documents(max_tokens_per_doc, max_model_len=card.max_model_len)
    if model.scoring is None:
        asks: list[tuple[Prompt, Ask]] = [((Text(query),), ask)]
        asks += [((Text(each),), cut) for each in documents]
        made = await _embedded(model, asks, ["query", *names])
        found = [_alike(model, made[0].vector_C, each.vector_C) for each in made[1:]]
        return found, Cost.of(made)
    pairs: list[tuple[str, str | Tokens]] = [(query, each) for each in documents]
    if max_tokens_per_doc is not None:
        if isinstance(model.scoring, PairScore) and ask.truncate_prompt_tokens is None:
            ask = replace(ask, truncate_prompt_tokens=-1)
        pairs = [
            (query, await _cut(model, each, max_tokens_per_doc, name))
            for each, name in zip(documents, names, strict=True)
        ]
    return await _scored(model, model.scoring, pairs, ask, names)


async def _cut(model: ModelService, text: str, max_tokens: int, name: str) -> str | Tokens:
    """``text``, or its first ``max_tokens`` tokens. Raises InvalidRequest: it is longer, and goes
    through a chat template, which takes no tokens."""
    token_ids = await model.prompts.tokenize((Text(text, add_special_tokens=False),))
    if len(token_ids) <= max_tokens:
        return text
    if isinstance(model.scoring, LogitScore):
        raise InvalidRequest(
            f"{name} has {len(token_ids)} tokens: max_tokens_per_doc={max_tokens} cannot cut it, "
            "since the model's chat template writes something behind it; send shorter ones",
            param="max_tokens_per_doc",
        )
    return Tokens(token_ids[:max_tokens])


async def score(
    model: ModelService, pairs: Sequence[tuple[str, str]], ask: Ask
) -> tuple[list[float], Cost]:
    """Scores how well the texts of each pair match, as `rank` does, and the cost."""
    _check_number(len(pairs), "text_2")
    if model.scoring is not None:
        names = [f"pair {place}" for place in range(len(pairs))]
        return await _scored(model, model.scoring, pairs, ask, names)
    names_of: dict[str, str] = {}
    for place, pair in enumerate(pairs):
        for name, text in zip(("text_1", "text_2"), pair, strict=True):
            names_of.setdefault(text, f"pair {place}: {name}")
    asks: list[tuple[Prompt, Ask]] = [((Text(each),), ask) for each in names_of]
    made = await _embedded(model, asks, [*names_of.values()])
    vectors = {text: each.vector_C for text, each in zip(names_of, made, strict=True)}
    found = [_alike(model, vectors[left], vectors[right]) for left, right in pairs]
    return found, Cost.of(made)


def _alike(model: ModelService, first_C: Floats, second_C: Floats) -> float:
    return similarity(first_C, second_C, model.use.similarity)


async def _scored(
    model: ModelService,
    scoring: Scoring,
    pairs: Sequence[tuple[str, str | Tokens]],
    ask: Ask,
    names: Sequence[str],
) -> tuple[list[float], Cost]:
    requests = []
    for query, document in pairs:
        if isinstance(scoring, PairScore):
            prompt = pair_prompt(scoring.prompt + query, document, model.tokenizer)
            requests.append(ask.embedding(prompt))
        else:
            assert isinstance(document, str), "a chat template takes no tokens"
            requests.append(ask.score(query, document, scoring))
    prepared = await _prepared(model, requests, names)
    for name, each in zip(names, prepared, strict=True):
        with _named(name):
            if isinstance(scoring, PairScore):
                check_pair(each.prompt_token_ids, model.tokenizer)
            else:
                check_uncut(len(each.prompt_token_ids), ask.truncate_prompt_tokens)
    scores, costs = [0.0] * len(pairs), []

    async def take(chunk: Chunk) -> None:
        if chunk.embedding is not None and isinstance(scoring, PairScore):
            scores[chunk.index] = scoring.of(float(chunk.embedding[0]))
        if isinstance(scoring, LogitScore):
            for each in chunk.logprobs:
                scores[chunk.index] = scoring.of(dict(each.top) | {each.token_id: each.logprob})
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
