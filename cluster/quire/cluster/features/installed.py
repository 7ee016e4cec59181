"""The features of a gateway, and what each adds to it. A new one is an entry here."""

from collections.abc import Sequence

from quire.cluster.features.adapters.api import adapter_routes
from quire.cluster.features.anthropic.api import MESSAGES_CALL, anthropic_routes
from quire.cluster.features.anthropic.format import anthropic_error
from quire.cluster.features.embeddings.api import embedding_routes
from quire.cluster.features.explain.api import routing_routes
from quire.cluster.features.live.api import ui_routes
from quire.cluster.features.reference.document import reference_routes
from quire.cluster.features.responses.api import RESPONSES_CALL
from quire.cluster.features.tenants.api import usage_routes
from quire.cluster.features.tenants.limits import LIMIT_HEADERS
from quire.cluster.features.vllm_grpc.service import vllm_service
from quire.cluster.seams import Feature

INSTALLED: Sequence[Feature] = (
    Feature(name="adapters", routes=adapter_routes),
    Feature(name="responses", text_calls=[RESPONSES_CALL]),
    Feature(
        name="anthropic",
        text_calls=[MESSAGES_CALL],
        routes=anthropic_routes,
        error_forms={MESSAGES_CALL.path: anthropic_error},
    ),
    Feature(name="embeddings", routes=embedding_routes),
    Feature(name="explain", routes=routing_routes),
    Feature(name="tenants", routes=usage_routes, response_headers=LIMIT_HEADERS),
    Feature(name="tracing", response_headers=["traceresponse"]),
    Feature(name="vllm_grpc", grpc_service=vllm_service),
    Feature(name="live", routes=ui_routes),
    Feature(name="reference", routes_about=reference_routes),
)
"""In the order in which the reference lists their calls below a heading."""
