"""A Python gRPC client of Quire, the LLM serving cluster."""

from quire_client.client import AsyncClient, Client
from quire_client.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuireError,
    Unauthenticated,
    Unavailable,
)
from quire_client.inputs import Chat, Prompt, SamplingParams
from quire_client.outputs import Chunk, Completion, Embedding, Ranked, Start, TokenLogprobs, Usage

__all__ = [
    "Aborted",
    "AsyncClient",
    "Chat",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Embedding",
    "InvalidArgument",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "Prompt",
    "QuireError",
    "Ranked",
    "SamplingParams",
    "Start",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
