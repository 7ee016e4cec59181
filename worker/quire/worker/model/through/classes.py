"""Selects the transformers classes of a model and of its configuration."""

import inspect
import json
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from quire.worker.model.families.other import unknown
from quire.worker.model.families.wrappers import architecture_of
from quire.worker.model.spec import ModelSpec
from quire.worker.request.errors import CheckpointError
from quire.worker.weights.fields import Fields


def transformers_config(path: Path, spec: ModelSpec) -> Any:
    """transformers' configuration of ``spec``. The architecture determines its class.

    Raises:
        CheckpointError: transformers has no such class.
    """
    assert spec.through_transformers is not None
    raw = json.loads(spec.through_transformers)
    name, kind = architecture_of(Fields(raw, path)), raw.get("model_type")
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if spec.has_head else MODEL_MAPPING_NAMES
    if spec.is_classifier:
        classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    kinds = [each for each, known in classes.items() if known == name]
    is_of_kind = name == kind or (not spec.has_head and _is_class_of(name, kind))
    if is_of_kind and kind in classes:
        kinds = [kind]
    if not kinds:
        raise CheckpointError(f"{path}: {unknown(name)}")
    kind = kind if kind in kinds else kinds[0]
    try:
        config = CONFIG_MAPPING[kind].from_dict(
            PreTrainedConfig._decode_special_floats(raw) | {"model_type": kind}
        )
    except Exception as error:
        raise CheckpointError(
            f"{path}: transformers cannot read its config.json ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''})"
        ) from error
    config.architectures = [classes[kind]]
    if issubclass(getattr(transformers, classes[kind]), GenericForSequenceClassification):
        raise CheckpointError(
            f"{path}: architecture {name!r} is not supported: a decoder with a classifier; "
            "encoders with one are, and decoders that score by their logits"
        )
    if spec.is_encoder:
        config.is_decoder = False
    return config


def _is_class_of(name: str, kind: Any) -> bool:
    """Whether transformers has a class ``name`` for models of type ``kind``."""
    config = getattr(getattr(transformers, name, None), "config_class", None)
    return config is not None and config.model_type == kind


def auto_class(spec: ModelSpec) -> Any:
    """The auto class of transformers that builds the model from a configuration."""
    if spec.is_classifier:
        return AutoModelForSequenceClassification
    return AutoModelForCausalLM if spec.has_head else AutoModel


def packed_part(model: Any, spec: ModelSpec) -> Any:
    """The part of ``model`` that computes the packed tokens of a step: all but a classifier, which
    runs on one text at a time."""
    return model.base_model if spec.is_classifier else model


def no_pooler(config: Any) -> dict[str, bool]:
    """Arguments that leave out an encoder's pooling layer, which is for other tasks."""
    model_class = getattr(transformers, config.architectures[0])
    known = inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in known else {}
