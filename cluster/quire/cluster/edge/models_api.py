"""The models that a gateway serves, by all their names: ``GET /v1/models``, and one of them."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.cluster.serving.models import Models
from quire.cluster.serving.service import ModelService


def model_routes(models: Models) -> list[Route]:
    created = int(time.time())

    async def listed(request: Request) -> Response:
        unserved = [name for name in models.troubles if name not in models.by_name]
        names = [*models.by_name, *unserved, *models.aliases]
        data = [_described(name, models, created) for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        if not name:  # The list, with a slash behind it.
            return await listed(request)
        if name not in models.troubles:
            models.named(name)  # Raises, where there is none.
        return JSONResponse(_described(name, models, created))

    return [
        Route("/v1/models", listed, methods=["GET"]),
        Route("/v1/models/{model:path}", one, methods=["GET"]),
    ]


def _described(name: str, models: Models, created: int) -> dict[str, object]:
    """``name`` may be an alias."""
    root = models.aliases.get(name, name)
    model, trouble = models.by_name.get(root), models.troubles.get(root, "")
    card = model.groups.card if model else None
    state = state_of(model, trouble)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": root,
        "max_model_len": card.max_model_len if card else None,
        "state": state,
        **({"reason": trouble} if state == "failed" else {}),
    }


def state_of(model: ModelService | None, trouble: str) -> str:
    """A model that is "asleep" has no group until a request comes; one that "failed" gets none."""
    if model and model.groups.num_ready:
        return "ready"
    if trouble or not model:
        return "failed"
    return "asleep" if model.config.wakes_groups else "starting"
