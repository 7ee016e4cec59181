"""Checkpoints with several storage formats: each module is read in its own."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.worker.weights.packers import FORMATS, Packed, mixed_copy
from torch import Tensor

from quire.worker.model.config import read_model_spec
from quire.worker.model.through.state import state_of
from quire.worker.weights.checkpoint import open_checkpoint
from quire.worker.weights.fields import Fields
from quire.worker.weights.loader import Weights
from quire.worker.weights.stored import StoredFormat, StoredWeights, read_stored_weights

PROMPT = list(range(3, 60))
MODULES = [
    f"model.layers.{number}.{part}"
    for number in range(2)
    for part in (
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
]
EXPRESSIONS = (
    "re:.*self_attn.*",
    "re:.*layers\\.1\\..*",
    "re:.*(gate|up)_proj$",
    "re:model\\.layers\\.0\\.mlp",
    "re:down_proj",
)
COMPRESSED = [name for name in FORMATS if name.startswith(("packed", "int8", "float8", "compr"))]
MODELOPT = {"FP8": "modelopt-fp8", "W4A16_NVFP4": "modelopt-nvfp4", "MXFP8": "modelopt-mxfp8"}


def _packing(name: str) -> Callable[[Tensor], Packed]:
    return FORMATS[name][1]


def _mixed_groups(rng: random.Random) -> tuple[dict[str, Any], dict[str, str]]:
    """Some groups of compressed-tensors, and each module's name in `FORMATS`."""
    targets = [*rng.sample(MODULES, 4), *rng.sample(EXPRESSIONS, 3), "Linear"]
    chosen = {target: rng.choice(COMPRESSED) for target in targets}
    groups = {}
    for number, name in enumerate(dict.fromkeys(chosen.values())):
        config = FORMATS[name][0]
        groups[f"group_{number}"] = config["config_groups"]["group_0"] | {
            "format": config["format"],
            "targets": [target for target in rng.sample(targets, 8) if chosen[target] == name],
        }
    ignored = rng.sample(MODULES, 2)
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["lm_head", ignored[0], f"re:{re.escape(ignored[1])}$"],
        "config_groups": groups,
    }
    expressions = sorted(target for target in chosen if target.startswith("re:"))
    formats = {}
    for module in MODULES:
        told = [each for each in expressions if re.match(each.removeprefix("re:"), module)]
        if module not in ignored:
            formats[module] = chosen[next(iter([*chosen.keys() & {module}, *told, "Linear"]))]
    return config, formats


def _mixed_layers(rng: random.Random) -> tuple[dict[str, Any], dict[str, str]]:
    """ModelOpt's list of layers, one of which stands for all modules below it; and formats."""
    whole = "model.layers.1.mlp"
    listed = [each for each in rng.sample(MODULES, 10) if not each.startswith(whole)]
    algorithms = {each: rng.choice(list(MODELOPT)) for each in [*listed, whole]}
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    config = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "exclude_modules": [*listed[:1], "*.1.mlp.up_proj"],
    }
    formats = {}
    for module in MODULES:
        name = whole if module.startswith(whole) else module
        if name in algorithms and module not in (listed[0], f"{whole}.up_proj"):
            formats[module] = MODELOPT[algorithms[name]]
    return config, formats


@pytest.mark.parametrize("mixed", [_mixed_groups, _mixed_layers])
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_the_decoded_checkpoint(
    mixed: Callable[[random.Random], tuple[dict[str, Any], dict[str, str]]],
    seed: int,
    tiny_llama: Path,
    tmp_path: Path,
    runner_of: Any,
    driver: Any,
    row: Any,
) -> None:
    config, formats = mixed(random.Random(seed))
    packed, meant = mixed_copy(
        tiny_llama,
        tmp_path,
        config,
        lambda module: _packing(formats[module]) if module in formats else None,
    )
    found, expected = (
        runner_of(path).forward(driver.step([row(PROMPT, [5, 2, 9, 0])]))
        for path in (packed, meant)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    tensors = load_file(meant / "model.safetensors")
    options: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    stored = read_model_spec(packed).stored
    with Weights.open(open_checkpoint(packed), **options, stored=stored) as weights:
        state = state_of(weights)
        assert state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(torch.as_tensor(state[name][...]), tensor)


def _stored(folder: Path, **fields: Any) -> StoredWeights:
    stored = read_stored_weights(Fields({"quantization_config": fields}, folder / "config.json"))
    assert stored is not None
    return stored


def _group(*targets: str, num_bits: int) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": num_bits, "strategy": "channel"}
    return {"targets": list(targets), "weights": weights, "format": "pack-quantized"}


def _bits(stored: StoredFormat | None) -> int:
    return 16 if stored is None else stored.bits


def test_a_name_comes_before_an_expression_and_that_before_all(tmp_path: Path) -> None:
    stored = _stored(
        tmp_path,
        quant_method="compressed-tensors",
        config_groups={
            "a": _group("Linear", "re:.*b", num_bits=4),
            "b": _group("re:.*a", "re:.*x", "m.0.ab", num_bits=8),
            "c": {"targets": ["m.0.x"], "weights": None, "input_activations": {}},
            "d": _group("re:.*x", num_bits=4),
        },
        ignore=["re:.*\\.1\\."],
    )
    names = {"m.0.ab": 8, "m.2.ab": 8, "m.2.b": 4, "m.2.c": 4, "m.2.x": 4, "m.0.x": 16, "m.1.a": 16}
    assert {name: _bits(stored.format_of(name)) for name in names} == names


def test_a_listed_layer_stands_for_the_modules_below_it(tmp_path: Path) -> None:
    """Names are those of the files, or of the decoder alone."""
    stored = _stored(
        tmp_path,
        quant_algo="MIXED_PRECISION",
        quant_method="modelopt",
        quantized_layers={
            "model.language_model.layers.0.mlp.experts": {"quant_algo": "NVFP4"},
            "model.language_model.layers.0.mlp.experts.1": {"quant_algo": "FP8"},
            "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        },
        ignore=["mtp*"],
    )
    names = {
        ("layers.0.mlp.experts.0.up_proj",): 4,
        ("layers.0.mlp.experts.1.up_proj",): 8,
        ("layers.0.mlp.gate",): 16,
        ("layers.1.mlp.experts.0.up_proj",): 16,
    }
    for (name,), bits in names.items():
        in_files = f"model.language_model.{name}"
        assert _bits(stored.format_of(f"model.{name}", in_files)) == bits
    assert _bits(stored.format_of("lm_head")) == 4
    assert (stored.least_bits, stored.has_4_bits) == (4, True)
