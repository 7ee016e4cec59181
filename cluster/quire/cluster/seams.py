"""How a feature reaches into a gateway: the fields of `Feature` are all that it can add.

`quire.cluster.features.installed` lists the features. The code that serves takes them as an
argument, and imports none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.cluster.edge.body import BodyReader
    from quire.cluster.edge.call import Call
    from quire.cluster.edge.grpc_calls import GrpcService
    from quire.cluster.edge.http_errors import ErrorForm
    from quire.cluster.edge.openai_format import Format
    from quire.cluster.edge.openai_schema import GenerationBody
    from quire.cluster.edge.routes import ApiRoute
    from quire.cluster.gateway.models import Models


@dataclass(frozen=True, kw_only=True)
class TextCall:
    """A call over HTTP that generates text, in one API's words."""

    path: str
    body: "type[GenerationBody]"
    format: "type[Format]"
    """Makes the answer, whole or as a stream."""
    id_prefix: str
    """How the answer's id begins."""
    prompt_field: str = "prompt"
    """The body's field to which errors of the prompt refer."""
    call: "Call"


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a feature adds to a gateway. A field that is left out adds nothing."""

    name: str
    text_calls: Sequence[TextCall] = ()
    routes: "Callable[[Models, BodyReader], Sequence[ApiRoute]] | None" = None
    routes_about: "Callable[[Sequence[ApiRoute]], Sequence[ApiRoute]] | None" = None
    """Makes routes that describe the given ones, which are all others."""
    grpc_service: "Callable[[Models], GrpcService | None] | None" = None
    """``None`` where it cannot be served."""
    response_headers: Sequence[str] = ()
    """Headers of answers, which pages of other origins may read."""
    error_forms: "Mapping[str, ErrorForm]" = field(default_factory=dict)
    """How errors look where they are not OpenAI's, by path; all paths below it are meant too."""
