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
        names = {**{name: name for name in models.by_name}, **models.aliases}
        data = [_described(id_, models.by_name[name], created) for id_, name in names.items()]
        return JSONResponse({"object": "list", "data": data})

    async def one(request: Request) -> Response:
        name = request.path_params["model"]
        if not name:  # The list, with a slash behind it.
            return await listed(request)
        return JSONResponse(_described(name, models.named(name), created))

    return [
        Route("/v1/models", listed, methods=["GET"]),
        Route("/v1/models/{model:path}", one, methods=["GET"]),
    ]


def _described(name: str, model: ModelService, created: int) -> dict[str, object]:
    """``name`` may be an alias. A model that is "asleep" has no group until a request comes."""
    card, state = model.groups.card, "starting"
    if model.groups.num_ready:
        state = "ready"
    elif model.config.wakes_groups:
        state = "asleep"
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "quire",
        "root": model.model,
        "max_model_len": card.max_model_len if card else None,
        "state": state,
    }
