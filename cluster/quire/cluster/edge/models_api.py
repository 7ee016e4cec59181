"""The models that a gateway serves, by all their names, and their LoRA adapters.

    GET  /v1/models                 all models with their tasks; /v1/models/NAME returns one
    POST /v1/load_lora_adapter      loads an adapter under a name, replacing one of that name
    POST /v1/unload_lora_adapter    removes a name

The latter two are vLLM's. They need an operator's key if keys are configured.
"""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.served_fields import Body
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.service import ModelService

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


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


def model_routes(models: Models, bodies: BodyReader) -> list[ApiRoute]:
    created = int(time.time())

    async def listed(request: Request) -> Response:
        unserved = [name for name in models.troubles if name not in models.by_name]
        names = [*models.by_name, *unserved, *models.aliases]
        names += [adapter.name for adapter in models.adapters]
        data = [_described(name, models, created) for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        if not name:  # The list's path, with a trailing slash.
            return await listed(request)
        if name not in models.troubles:
            models.named(name)  # Raises if there is none.
        return JSONResponse(_described(name, models, created))

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
        ApiRoute("/v1/models", listed, methods=["GET"], access=Access.KEY),
        ApiRoute("/v1/models/{model:path}", one, methods=["GET"], access=Access.KEY),
        ApiRoute(LOAD_PATH, load, methods=["POST"], access=Access.OPERATOR),
        ApiRoute(UNLOAD_PATH, unload, methods=["POST"], access=Access.OPERATOR),
    ]


def _done(message: str, incomplete: str) -> Response:
    later = f" {incomplete}, and will be told again." if incomplete else ""
    return PlainTextResponse(f"Success: {message}{later}")


def _described(name: str, models: Models, created: int) -> dict[str, object]:
    """The description of ``name``, which may be an alias's or an adapter's."""
    root = models.aliases.get(name, name)
    trouble = models.troubles.get(root, "")
    model = models.by_name.get(root) or models.adapters.named(root)
    card = model.groups.card if model else None
    adapter = model.adapter if model else None
    state = state_of(model, trouble)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": adapter.source if adapter else root,
        "max_model_len": card.max_model_len if card else None,
        "task": (model.task if model else "") or None,
        "state": state,
        **({"reason": trouble} if state == "failed" else {}),
        **({"parent": adapter.model} if adapter else {}),
    }


def state_of(model: ModelService | None, trouble: str) -> str:
    """The state of a model. An "asleep" one starts a group at the first request; a "failed" one has
    none."""
    if model and model.groups.num_ready:
        return "ready"
    if trouble or not model:
        return "failed"
    return "asleep" if model.config.wakes_groups else "starting"
