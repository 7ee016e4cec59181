"""The checks of a request before an engine queues it."""

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from quire.worker.request.errors import InvalidRequest
from quire.worker.request.limits import (
    RequestLimits,
    check_embedding,
    check_request,
    check_token_ids,
)
from quire.worker.request.request import Output, Prepared, Task

if TYPE_CHECKING:
    from quire.worker.model.facts import ModelFacts


def max_tokens_of(
    request: Prepared, limits: RequestLimits, model: "ModelFacts", *, takes_adapters: bool
) -> int:
    """How many output tokens the request may have, including resumed ones.

    Raises:
        InvalidRequest: This engine can never serve the request; the message says why.
    """
    for name, asked, kind in (
        ("task", {request.task}, Task),
        ("outputs", request.outputs, Output),
    ):
        if not asked <= set(get_args(kind)):
            known = " or ".join(map(repr, get_args(kind)))
            raise InvalidRequest(f"{name}={getattr(request, name)!r}: use {known}", param=name)
    if request.adapter and not takes_adapters:
        raise InvalidRequest(
            f"adapter={request.adapter!r}: adapters are not enabled here; leave it out, or set "
            "enable_lora",
            param="adapter",
        )
    if request.features:
        raise InvalidRequest(
            f"features={request.features!r}: this model takes none, leave it out",
            param="features",
        )
    if request.task == "embed":
        if model.pooling is None:
            raise InvalidRequest(
                "this model makes no embeddings: it generates text",
                param="model",
            )
        check_embedding(request.prompt_token_ids, replace(limits, task="embed"))
        return 1
    if not model.has_head:
        raise InvalidRequest(
            "this model has no head to generate text with: it makes embeddings only",
            param="model",
        )
    if request.is_checked and (max_tokens := _checked(request, limits)):
        return max_tokens
    return check_request(
        request.prompt_token_ids,
        request.sampling,
        limits,
        resumed_token_ids=request.resumed_token_ids,
    )


def _checked(request: Prepared, limits: RequestLimits) -> int:
    """`max_tokens_of` for a request that a gateway has checked; 0 if it exceeds this engine's
    limits, so that `check_request` refuses it with the reason."""
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("resumed output", request.resumed_token_ids),
    ):
        check_token_ids(name, token_ids, limits.vocab_size)
    max_tokens = request.sampling.max_tokens or 0
    num_prompt, num_resumed = len(request.prompt_token_ids), len(request.resumed_token_ids)
    is_fit = num_prompt and num_resumed <= max_tokens <= limits.max_model_len - num_prompt
    return max_tokens if is_fit else 0
