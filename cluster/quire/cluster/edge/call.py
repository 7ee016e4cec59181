"""What the reference says of a route's call. It stands beside the route's handler."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from quire.cluster.edge.served_fields import Body

Json = dict[str, Any]


class Heading(Enum):
    """The headings of the reference, in their order."""

    TEXT = "Generate text"
    SCORES = "Embed and score"
    TOKENS = "Tokens"
    SERVER = "The server"


class Call(NamedTuple):
    """One path of the API."""

    summary: str
    heading: Heading
    body: type[Body] | None = None
    streams: bool = False
    example: Json | None = None
    """A body that any model can answer."""
    answer: Json | str | None = None
    """An answer to it, shortened; each key and type in it is served."""
    query: Mapping[str, str] = {}
    """What may stand behind ``?``, with what it means."""
    media: str = "application/json"


QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MESSAGES = [{"role": "user", "content": QUESTION}]
"""Parts of examples."""
