"""The calls of the HTTP API: what each is for, with an example of its body and of its answer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.cluster.edge.models_api import (
    LOAD_PATH,
    UNLOAD_PATH,
    LoadAdapterBody,
    UnloadAdapterBody,
)
from quire.cluster.edge.openai_schema import ChatBody, CompletionBody
from quire.cluster.edge.served_fields import Body
from quire.cluster.edge.text_api import DetokenizeBody, TokenizeBody
from quire.cluster.features.anthropic.schema import CountTokensBody, MessagesBody
from quire.cluster.features.embeddings.api import EmbeddingsBody, RerankBody, ScoreBody
from quire.cluster.features.responses.schema import ResponsesBody

Json = dict[str, Any]


class Call(NamedTuple):
    """One path of the API."""

    summary: str
    group: str
    """The heading under which it stands."""
    body: type[Body] | None = None
    streams: bool = False
    example: Json | None = None
    """A body that any model can answer."""
    answer: Json | str | None = None
    """An answer to it, shortened; each key and type in it is served."""
    query: Mapping[str, str] = {}
    """What may stand behind ``?``, with what it means."""
    media: str = "application/json"


_TEXT, _SCORES, _TOKENS, _SERVER = "Generate text", "Embed and score", "Tokens", "The server"
_QUESTION = "What is the capital of France?"
_ANSWER = "The capital of France is Paris."
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 10,
    "total_tokens": 21,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_USED = {"requests": 2, "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 8}
_HEADER = {"created": 1767225600, "model": "NAME", "system_fingerprint": "fp_273a2d7d86d4"}
_SUM = {"prompt_tokens": 11, "total_tokens": 11}
_MODEL = {
    "id": "NAME",
    "object": "model",
    "created": 1767225600,
    "owned_by": "quire",
    "root": "NAME",
    "max_model_len": 1024,
    "task": "generate",
    "state": "ready",
}
_HEALTH = {"status": "ready", "ready_groups": 1}
_RERANK = Call(
    "Orders documents by their similarity to a query.",
    _SCORES,
    RerankBody,
    example={"query": _QUESTION, "documents": ["Paris.", "It rains."]},
    answer={
        "id": "rerank-0",
        "model": "NAME",
        "results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "Paris."}}],
        "usage": _SUM,
    },
)
_SCORE = Call(
    "Similarity of texts.",
    _SCORES,
    ScoreBody,
    example={"text_1": _QUESTION, "text_2": ["Paris."]},
    answer={
        "id": "score-0",
        "object": "list",
        "created": 1767225600,
        "model": "NAME",
        "data": [{"index": 0, "object": "score", "score": 0.9}],
        "usage": _SUM,
    },
)
CALLS: Mapping[str, Call] = {
    "/v1/chat/completions": Call(
        "Generates the next message of a chat.",
        _TEXT,
        ChatBody,
        streams=True,
        example={"messages": _MESSAGES},
        answer={
            "id": "chatcmpl-6a9ec4eee08c290a2e410167",
            "object": "chat.completion",
            **_HEADER,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": _ANSWER, "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
    "/v1/completions": Call(
        "Generates text after a prompt.",
        _TEXT,
        CompletionBody,
        streams=True,
        example={"prompt": "The capital of France is", "max_tokens": 16},
        answer={
            "id": "cmpl-f145a9a3ca07981f1c557b04",
            "object": "text_completion",
            **_HEADER,
            "choices": [
                {
                    "index": 0,
                    "text": " Paris, the largest city of the country.",
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": _USAGE,
        },
    ),
    "/v1/responses": Call(
        "Generates the next items of a conversation (OpenAI's responses).",
        _TEXT,
        ResponsesBody,
        streams=True,
        example={"input": _QUESTION},
        answer={
            "id": "resp_b62514f7f7454c0f7dd48c10",
            "object": "response",
            "created_at": 1767225600,
            "status": "completed",
            "model": "NAME",
            "error": None,
            "incomplete_details": None,
            "output": [
                {
                    "id": "msg_b62514f7f7454c0f7dd48c10_0",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": _ANSWER, "annotations": []}],
                }
            ],
            "usage": {
                "input_tokens": 11,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": 10,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 21,
            },
        },
    ),
    "/v1/messages": Call(
        "Generates the next message of a chat (Anthropic's messages).",
        _TEXT,
        MessagesBody,
        streams=True,
        example={"max_tokens": 64, "messages": _MESSAGES},
        answer={
            "id": "msg_30842b151b6d5724a2e69ebe",
            "type": "message",
            "role": "assistant",
            "model": "NAME",
            "content": [{"type": "text", "text": _ANSWER}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 11,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 10,
            },
        },
    ),
    "/v1/embeddings": Call(
        "Embeddings of texts, for embedding models.",
        _SCORES,
        EmbeddingsBody,
        example={"input": _QUESTION},
        answer={
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8]}],
            "model": "NAME",
            "usage": _SUM,
        },
    ),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/messages/count_tokens": Call(
        "Counts the tokens of a prompt in Anthropic's format.",
        _TOKENS,
        CountTokensBody,
        example={"messages": _MESSAGES},
        answer={"input_tokens": 11},
    ),
    "/tokenize": Call(
        "Tokenizes a text or a chat.",
        _TOKENS,
        TokenizeBody,
        example={"prompt": _QUESTION},
        answer={"count": 3, "max_model_len": 1024, "tokens": [0, 287, 267], "token_strs": None},
    ),
    "/detokenize": Call(
        "Converts token ids to text.",
        _TOKENS,
        DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        answer={"prompt": "What is"},
    ),
    "/v1/models": Call(
        "Lists the served models and adapters.",
        _SERVER,
        answer={"object": "list", "data": [_MODEL]},
    ),
    "/v1/models/{model:path}": Call(
        "Describes one served model; 404 if it is not served.", _SERVER
    ),
    LOAD_PATH: Call(
        "Loads a LoRA adapter under a name. Needs an operator's key.",
        _SERVER,
        LoadAdapterBody,
        example={"lora_name": "sql", "lora_path": "ORG/NAME"},
        answer="Success: LoRA adapter 'sql' added successfully.",
        media="text/plain",
    ),
    UNLOAD_PATH: Call(
        "Unloads the adapter of a name. Needs an operator's key.",
        _SERVER,
        UnloadAdapterBody,
        example={"lora_name": "sql"},
        answer="Success: LoRA adapter 'sql' removed successfully.",
        media="text/plain",
    ),
    "/v1/routing/decisions": Call(
        "Explains routing decisions.",
        _SERVER,
        query={
            "request_id": "The id of an answer, or the client's own X-Request-Id.",
            "limit": "How many of the latest decisions, newest first; 20 by default.",
        },
        answer={"object": "list", "data": []},
    ),
    "/v1/usage": Call(
        "Usage of the API key's tenant, by key.",
        _SERVER,
        query={"tenant": "With an operator's key: one tenant; if absent, all."},
        answer={
            "object": "list",
            "since": 1_790_000_000,
            "data": [
                {
                    "tenant": "acme",
                    "key": "ci",
                    **_USED,
                    "minutes": [{"start": 1_790_000_040, **_USED}],
                }
            ],
        },
    ),
    "/version": Call("The version of Quire.", _SERVER, answer={"version": "0.1.0"}),
    "/load": Call(
        "Completions in progress at this gateway, of all tenants. With API keys, needs an "
        "operator's key.",
        _SERVER,
        answer={"server_load": 0},
    ),
    "/health": Call(
        "200 while a group can serve, else 503. Needs no key.", _SERVER, answer=_HEALTH
    ),
    "/ping": Call("The same as /health.", _SERVER, answer=_HEALTH),
    "/metrics": Call(
        "Prometheus metrics. With API keys, needs an operator's key.", _SERVER, media="text/plain"
    ),
    "/openapi.json": Call("The OpenAPI document.", _SERVER),
    "/docs": Call("This reference, as a page.", _SERVER, media="text/html"),
}
