"""Embeddings, reranking and scores over HTTP.

    POST /v1/embeddings   OpenAI's: vectors of texts or of token ids
    POST /v1/rerank       Cohere's and Jina's: documents, ordered by similarity to a query;
                          also /v2/rerank and /rerank
    POST /v1/score        vLLM's: similarity of two texts; also /score

A score is the similarity of two embeddings, or a reranker's score of the pair.
"""

import asyncio
import base64
import json
import time
from typing import Annotated, Any, Literal, cast
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.auth import http_caller
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import QUESTION, Call, Heading
from quire.cluster.edge.openai_schema import TokenIds
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.served_fields import Body
from quire.cluster.edge.streams import client_id, unless_disconnected
from quire.cluster.features.embeddings.embed import MAX_INPUTS, Ask, Cost, best, embed, rank, score
from quire.cluster.gateway.models import Models
from quire.worker.request.arrays import Floats
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prompt, Text, Tokens

_MANY_NUMBERS = 2**16
"""An answer with more numbers than this is serialized in a thread."""

_MANY = Field(fail_fast=True, max_length=MAX_INPUTS)
_Texts = Annotated[list[str], _MANY]
_Positive = Annotated[int, Field(ge=1)]


class _AskBody(Body):
    """Fields that all these bodies share. ``timeout``: seconds from the request's arrival."""

    accepted = frozenset({"user"})

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncate: Literal["NONE", "END"] | None = None
    """Cohere's: "END" cuts off the end of a text that is too long for the model."""
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def ask(self, request: Request) -> Ask:
        caller = http_caller(request)
        return Ask(
            truncate_prompt_tokens=self.num_kept(),
            tenant=caller.tenant,
            key_name=caller.key_name,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            timeout_s=self.timeout,
            client_id=client_id(request.headers),
        )

    def num_kept(self) -> int | None:
        """Number of tokens kept of each text; -1 means as many as the model takes, ``None`` all."""
        if self.truncate_prompt_tokens is None and self.truncate == "END":
            return -1
        return self.truncate_prompt_tokens


class EmbeddingsBody(_AskBody):
    """OpenAI's ``/v1/embeddings``. ``dimensions``: number of leading components kept per vector."""

    input: str | _Texts | TokenIds | Annotated[list[TokenIds], _MANY]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Positive | None = None

    def prompts(self) -> list[Prompt]:
        given = self.input
        if isinstance(given, str):
            return [(Text(given),)]
        if given and isinstance(given[0], int):
            return [(Tokens(given),)]
        listed = cast("list[str] | list[list[int]]", given)
        return [(Text(each) if isinstance(each, str) else Tokens(each),) for each in listed]


class _Document(BaseModel):
    """A document with fields of the client's own, which are handed back."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankBody(_AskBody):
    """Cohere's and Jina's ``/v1/rerank``. ``max_tokens_per_doc``: tokens kept of each document."""

    query: str
    documents: Annotated[list[str | _Document], Field(max_length=2**16)]
    top_n: _Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: _Positive | None = None

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def shown(self, place: int) -> dict[str, Any]:
        """A document as it is handed back."""
        document = self.documents[place]
        return {"text": document} if isinstance(document, str) else document.model_dump()


class ScoreBody(_AskBody):
    """vLLM's ``/v1/score``."""

    text_1: str | _Texts
    text_2: str | _Texts

    def pairs(self) -> list[tuple[str, str]]:
        first, second = (
            [given] if isinstance(given, str) else given for given in (self.text_1, self.text_2)
        )
        if not first or len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many",
                param="text_1",
            )
        return list(zip(first * (len(second) // len(first)), second, strict=True))


_SUM = {"prompt_tokens": 11, "total_tokens": 11}
_EMBEDDINGS = Call(
    "Embeddings of texts, for embedding models.",
    Heading.SCORES,
    EmbeddingsBody,
    example={"input": QUESTION},
    answer={
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
        "model": "NAME",
        "usage": _SUM,
    },
)
_RERANK = Call(
    "Orders documents by their similarity to a query.",
    Heading.SCORES,
    RerankBody,
    example={"query": QUESTION, "documents": ["Paris.", "It rains."]},
    answer={
        "id": "rerank-0",
        "model": "NAME",
        "results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Paris."}}],
        "usage": _SUM,
    },
)
_SCORE = Call(
    "Similarity of texts.",
    Heading.SCORES,
    ScoreBody,
    example={"text_1": QUESTION, "text_2": ["Paris."]},
    answer={
        "id": "score-0",
        "object": "list",
        "created": 1767225600,
        "model": "NAME",
        "data": [{"index": 0, "object": "score", "score": 0.9}],
        "usage": _SUM,
    },
)


def embedding_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    async def embeddings(request: Request) -> Response:
        body, hold = await bodies.read(request, EmbeddingsBody)
        with hold:
            model = models.named(body.model)
            work = embed(model, body.prompts(), body.ask(request), dimensions=body.dimensions)
            made = await unless_disconnected(request, work)
        as_base64, usage = body.encoding_format == "base64", _usage(Cost.of(made))

        def answer() -> Response:
            # Item by item: while Python serializes one item, no other thread runs.
            data = ",".join(
                json.dumps(
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": _encoded(each.vector_C)
                        if as_base64
                        else each.vector_C.tolist(),
                    }
                )
                for index, each in enumerate(made)
            )
            rest = json.dumps({"model": model.model, "usage": usage})
            text = f'{{"object": "list", "data": [{data}], {rest[1:]}'
            return Response(text, media_type="application/json")

        num_numbers = sum(len(each.vector_C) for each in made)
        return answer() if num_numbers < _MANY_NUMBERS else await asyncio.to_thread(answer)

    async def rerank(request: Request) -> Response:
        body, hold = await bodies.read(request, RerankBody)
        with hold:
            model, texts = models.named(body.model), body.texts()
            work = rank(
                model,
                body.query,
                texts,
                body.ask(request),
                max_tokens_per_doc=body.max_tokens_per_doc,
            )
            scores, cost = await unless_disconnected(request, work)
        shows = body.return_documents is not False
        results: list[dict[str, Any]] = [
            {"index": place, "relevance_score": scores[place]}
            | ({"document": body.shown(place)} if shows else {})
            for place in best(scores, body.top_n)
        ]
        return JSONResponse(
            {
                "id": f"rerank-{uuid4().hex}",
                "model": model.model,
                "results": results,
                "usage": _usage(cost),
                "meta": {
                    "api_version": {"version": "2"},
                    "tokens": {"input_tokens": cost.num_prompt_tokens},
                },
            }
        )

    async def score_pairs(request: Request) -> Response:
        body, hold = await bodies.read(request, ScoreBody)
        with hold:
            model = models.named(body.model)
            work = score(model, body.pairs(), body.ask(request))
            scores, cost = await unless_disconnected(request, work)
        data = [
            {"object": "score", "index": index, "score": value}
            for index, value in enumerate(scores)
        ]
        return JSONResponse(
            {
                "id": f"score-{uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": model.model,
                "data": data,
                "usage": _usage(cost),
            }
        )

    return [
        ApiRoute(path, handler, methods=["POST"], access=Access.KEY, call=call)
        for handler, paths, call in (
            (embeddings, ("/v1/embeddings",), _EMBEDDINGS),
            (rerank, ("/v1/rerank", "/v2/rerank", "/rerank"), _RERANK),
            (score_pairs, ("/v1/score", "/score"), _SCORE),
        )
        for path in paths
    ]


def _encoded(vector_C: Floats) -> str:
    return base64.b64encode(vector_C.astype("<f4").tobytes()).decode()


def _usage(cost: Cost) -> dict[str, Any]:
    return {
        "prompt_tokens": cost.num_prompt_tokens,
        "total_tokens": cost.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cost.num_cached_tokens},
    }
