"""Loading and unloading of LoRA adapters over HTTP.

    POST /v1/load_lora_adapter      loads an adapter under a name, replacing one of that name
    POST /v1/unload_lora_adapter    removes a name

The names and shapes are vLLM's; both need an operator's key if keys are configured.
"""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.call import Call, Heading
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.served_fields import Body
from quire.cluster.gateway.models import Models


class LoadAdapterBody(Body):
    """vLLM's ``/v1/load_lora_adapter``. ``base_model_name`` is needed if several models take
    adapters."""

    accepted = frozenset({"load_inplace"})

    lora_name: str
    lora_path: str
    base_model_name: str | None = None


class UnloadAdapterBody(Body):
    """vLLM's ``/v1/unload_lora_adapter``."""

    accepted = frozenset({"lora_int_id"})

    lora_name: str


def adapter_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    async def load(request: Request) -> Response:
        body, hold = await bodies.read(request, LoadAdapterBody)
        with hold:
            _, incomplete = await models.adapters.load(
                body.lora_name, body.lora_path, model=body.base_model_name or ""
            )
        return _done(f"LoRA adapter '{body.lora_name}' added successfully.", incomplete)

    async def unload(request: Request) -> Response:
        body, hold = await bodies.read(request, UnloadAdapterBody)
        with hold:
            incomplete = await models.adapters.unload(body.lora_name)
        return _done(f"LoRA adapter '{body.lora_name}' removed successfully.", incomplete)

    return [
        ApiRoute(
            "/v1/load_lora_adapter",
            load,
            methods=["POST"],
            access=Access.OPERATOR,
            call=Call(
                "Loads a LoRA adapter under a name. Needs an operator's key.",
                Heading.SERVER,
                LoadAdapterBody,
                example={"lora_name": "sql", "lora_path": "ORG/NAME"},
                answer="Success: LoRA adapter 'sql' added successfully.",
                media="text/plain",
            ),
        ),
        ApiRoute(
            "/v1/unload_lora_adapter",
            unload,
            methods=["POST"],
            access=Access.OPERATOR,
            call=Call(
                "Unloads the adapter of a name. Needs an operator's key.",
                Heading.SERVER,
                UnloadAdapterBody,
                example={"lora_name": "sql"},
                answer="Success: LoRA adapter 'sql' removed successfully.",
                media="text/plain",
            ),
        ),
    ]


def _done(message: str, incomplete: str) -> Response:
    later = f" {incomplete}, and will be told again." if incomplete else ""
    return PlainTextResponse(f"Success: {message}{later}")
