"""A model that no backend can run is refused with the layer, field and value in the message."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from quire.worker import model
from quire.worker.model.config import read_model_spec
from quire.worker.model.program import make_program
from quire.worker.model.spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm, Rope
from quire.worker.model.support import check_runnable
from quire.worker.request.errors import CheckpointError
from quire.worker.weights.loader import Shard
from quire.worker.weights.stored import StoredWeights


@pytest.fixture(scope="module")
def spec(tiny_llama: Path) -> ModelSpec:
    return read_model_spec(tiny_llama)


def with_layer(spec: ModelSpec, **fields: Any) -> ModelSpec:
    return replace(spec, layers=(spec.layers[0], replace(spec.layers[1], **fields)))


def with_attention(spec: ModelSpec, **fields: Any) -> ModelSpec:
    return with_layer(spec, attention=replace(spec.layers[1].attention, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value_size": 8}, "value_size=8 is not supported beside key_size=16"),
        ({"num_kv_heads": 4}, "num_kv_heads=4 is not supported beside 2 in layer 0"),
    ],
)
def test_attention_of_another_kind_is_refused(
    fields: dict[str, Any], message: str, spec: ModelSpec
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_runnable(with_attention(spec, **fields), "config.json")
    assert f"config.json: layers.1.attention.{message}" in str(caught.value)


def test_no_program_is_made_of_a_model_that_none_can_run(spec: ModelSpec) -> None:
    wrong: Any = None  # nothing is read
    with pytest.raises(CheckpointError, match=r"model: layers\.1\.attention\.value_size=8"):
        make_program(
            with_attention(spec, value_size=8),
            wrong,
            shard=Shard(),
            backend=wrong,
            max_model_len=64,
        )


def test_other_parts_of_another_kind_are_refused(spec: ModelSpec) -> None:
    check_runnable(spec)
    mlp = Mlp(size=96)
    experts = Experts(mlp=mlp, num_experts=8, top_k=2)
    check_runnable(with_layer(spec, mlp=experts))
    for wrong, message in [
        (
            with_layer(spec, mlp=replace(mlp, activation="clamped_silu")),
            "activation='clamped_silu'",
        ),
        (with_layer(spec, mlp=replace(mlp, gated=False)), "'silu' is not supported with gated=Fa"),
        (
            replace(spec, stored=StoredWeights(has_mxfp4_experts=True)),
            "quant_method='mxfp4' is supported of gpt-oss' experts only",
        ),
        (
            with_layer(spec, mlp=replace(experts, mlp=replace(mlp, bias=True))),
            "layers.1.mlp.mlp with activation='silu', gated=True and bias=True is not supported",
        ),
    ]:
        with pytest.raises(CheckpointError) as caught:
            check_runnable(wrong)
        assert message in str(caught.value)


@pytest.mark.parametrize("part", [ModelSpec, Rope, Layer, Attention, Mlp, Experts, Norm])
def test_a_description_says_nothing_that_no_program_is_made_of(part: type) -> None:
    """Otherwise a new field could be described and then ignored."""
    readers = [*Path(model.__path__[0]).rglob("*.py")]
    text = "".join(each.read_text() for each in readers if each.name != "spec.py")
    for field in fields(part):
        assert re.search(rf"\w\.{field.name}\b|\"{field.name}\"", text), field.name
