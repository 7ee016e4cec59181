"""Checks the tensors of a checkpoint that nothing reads: each must be known not to affect outputs,
or it is refused by name. Does not import torch."""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from quire.worker.model.spec import ModelSpec

_KNOWN = re.compile(
    "|".join(
        (
            # Made from config.json.
            r".*rotary_emb\.inv_freq",
            r".*\.weight_shape",
            # Scales of activations and KV, which Quire does not quantise by the checkpoint.
            r".*\.(input|activation|output)_scale",
            r".*\.input_global_scale",
            r".*\.([qkv]|kv|prob)_scale",
            # Layers for multi-token prediction.
            r"(model\.)?mtp(_layers|_block)?\..*",
        )
    )
)
_BESIDE_TEXT = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_encoder|visual|image_newline|audio_tower"
    r"|multi_modal_projector|mm_projector|connector|mlp1|projector)\b.*"
)
"""Parts of a multimodal model that text requests do not use."""
_SHOWN = 3


def refuse_unused(
    checkpoint: Checkpoint, names: Iterable[str], spec: "ModelSpec", is_zero: Callable[[str], bool]
) -> None:
    """Checks that the unread tensors ``names`` do not affect outputs: they are known ones, or
    biases for which ``is_zero`` is true.

    Raises:
        CheckpointError: A tensor may affect outputs.
    """
    beginnings: tuple[str, ...] = ()
    if spec.layers:
        extra = range(len(spec.layers), len(spec.layers) + spec.num_extra_layers)
        beginnings = tuple(f"{spec.names.layer.format(number)}." for number in extra)
    left = [
        name
        for name in names
        if not _KNOWN.fullmatch(name)
        and not (spec.is_text_part and _BESIDE_TEXT.fullmatch(name))
        and not name.startswith(beginnings)
        and not (name.endswith(".bias") and is_zero(name))
    ]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise CheckpointError(
            f"{checkpoint.path}: tensors that config.json does not account for: "
            f"{', '.join(sorted(left)[:_SHOWN])}{more}; without them the model would be another "
            "one: correct config.json, or remove them from the files if they mean nothing"
        )
