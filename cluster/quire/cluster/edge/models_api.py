"""The models that a gateway serves, by all their names and those of their LoRA adapters.

GET /v1/models   all models with their tasks; /v1/models/NAME returns one
"""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.cluster.edge.access import Access
from quire.cluster.edge.call import Call, Heading
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.gateway.models import Models
from quire.cluster.gateway.service import ModelService

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


def model_routes(models: Models) -> list[ApiRoute]:
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

    return [
        ApiRoute(
            "/v1/models",
            listed,
            methods=["GET"],
            access=Access.KEY,
            call=Call(
                "Lists the served models and adapters.",
                Heading.SERVER,
                answer={"object": "list", "data": [_MODEL]},
            ),
        ),
        ApiRoute(
            "/v1/models/{model:path}",
            one,
            methods=["GET"],
            access=Access.KEY,
            call=Call("Describes one served model; 404 if it is not served.", Heading.SERVER),
        ),
    ]


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
