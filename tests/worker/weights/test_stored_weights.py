"""Quantised checkpoints give the results of their decoded weights, or are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.weights.packers import FORMATS, compressed, quantized_copy

from quire.kernels.grouped import GroupedWeight, decoded
from quire.kernels.native import library as native
from quire.worker.model.config import read_model_spec
from quire.worker.model.read_facts import model_facts
from quire.worker.rank.executor import make_executor
from quire.worker.request.errors import CheckpointError, ConfigError
from quire.worker.weights.checkpoint import open_checkpoint
from quire.worker.weights.fields import Fields
from quire.worker.weights.loader import Weights
from quire.worker.weights.stored import read_stored_weights

PROMPT = list(range(3, 60))
IN_GROUPS = {
    "gptq",
    "gptq-v2",
    "gptqmodel",
    "auto-round",
    "awq",
    "awq-names",
    "packed",
    "packed-asym",
}


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_decoded_checkpoint(
    name: str, tiny_llama: Path, tmp_path: Path, runner_of: Any, driver: Any, row: Any
) -> None:
    packed, meant = (
        runner_of(path).forward(driver.step([row(PROMPT, [5, 2, 9, 0])]))
        for path in quantized_copy(tiny_llama, tmp_path, name)
    )
    torch.testing.assert_close(packed, meant, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_reads_its_part_of_a_matrix(
    name: str, num_ranks: int, tiny_llama: Path, tmp_path: Path
) -> None:
    path, meant = quantized_copy(tiny_llama, tmp_path, name)
    expected = load_file(meant / "model.safetensors")
    options: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    spec = read_model_spec(path)
    with Weights.open(open_checkpoint(path), **options, stored=spec.stored) as weights:
        for module in ("self_attn.q_proj", "mlp.down_proj", "mlp.up_proj"):
            module = f"model.layers.1.{module}"
            whole = expected[f"{module}.weight"]
            for axis, size in enumerate(whole.shape):
                for rank in range(num_ranks):
                    bounds = size * rank // num_ranks, size * (rank + 1) // num_ranks
                    chosen = {("rows", "columns")[axis]: bounds}
                    shape = (whole.shape[0], whole.shape[1])
                    part = weights.read_matrix(module, shape, **chosen)
                    wanted = whole.narrow(axis, bounds[0], bounds[1] - bounds[0])
                    torch.testing.assert_close(decoded(part), wanted)
                    in_groups = name in IN_GROUPS and not (
                        name.startswith(("packed", "awq-names")) and module.endswith("up_proj")
                    )
                    assert isinstance(part, GroupedWeight) == in_groups


@pytest.mark.slow
@pytest.mark.skipif(native.library() is None, reason="plain products depend on their number")
def test_any_number_of_ranks_has_the_same_bits(
    tiny_llama: Path, tmp_path: Path, config_of: Any, driver: Any, row: Any
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, "packed-asym")
    found = []
    for size in (1, 2, 4):
        config = config_of(path, tensor_parallel_size=size, dtype="bfloat16")
        executor, _ = make_executor(config)
        step = driver.step([row(PROMPT, [5, 2, 9, 0]), row([7], [3])], num_logprobs=20)
        try:
            executor.submit(step)
            found.append(executor.result().logprobs)
        finally:
            executor.close()
    assert found[0] == found[1] == found[2]


_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method='hqq' is not supported; supported: 'auto"),
        ({"bits": 4}, "quant_method=None is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits=3 is not supported; suppo"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 20}, "group_size=20 must be a multi"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0 must be"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
            "packing_format='auto_round:auto_awq' is not supported",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32}
            | {"modules_in_block_to_quantize": [[3]]},
            "modules_in_block_to_quantize=[[3]] must be a list of names",
        ),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits=8 is not supported"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
            "version='gemv' is not supported; supported: 'gemm'",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=[128] must be 2"),
        (
            compressed("nvfp4-pack-quantized", **_INT4),
            "format='nvfp4-pack-quantized' of 4-bit int is not",
        ),
        (compressed("pack-quantized", **(_INT4 | {"num_bits": 3})), "of 3-bit int is not"),
        (compressed("pack-quantized", **(_INT4 | {"strategy": "row"})), "strategy='row' is not"),
        (
            compressed("pack-quantized", **_INT4) | {"config_groups": {}},
            "config_groups={} is not supported; one group or more is",
        ),
        (compressed("pack-quantized", **_INT4) | {"ignore": ["re:("]}, "ignore='re:(' must be"),
        (compressed("pack-quantized", **_INT4, actorder="own"), "actorder='own' is not supported"),
        ({"quant_algo": "INT8_SQ"}, "quant_algo='INT8_SQ' is not supported; supported: 'FP8', 'MX"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers={} is not supported with quant_algo"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT8_SQ"}}},
            "quant_algo='INT8_SQ' is not supported; supported: 'FP8', 'MXFP8', 'NVFP4'",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quant_method": "fp8"},
            "quant_method='fp8' is not supported; supported: 'modelopt'",
        ),
        (
            compressed("float-quantized", **(_INT4 | {"type": "float", "num_bits": 8}))
            | {"format": "mixed-precision"},
            "format='mixed-precision' of 8-bit float is not supported; supported: 'pack-q",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    config: dict[str, Any], message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, "fp8")
    _edit(path, quantization_config=config)
    with pytest.raises(CheckpointError) as caught:
        read_model_spec(path)
    assert message in str(caught.value)


def _drop(suffix: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(f"model.layers.1.mlp.down_proj.{suffix}")


def _spoil(suffix: str, value: float) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: (
        tensors[f"model.layers.1.mlp.down_proj.{suffix}"].view(-1)[3].fill_(value)
    )


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq", _drop("scales"), "down_proj.scales' [3, 64] is in none of"),
        ("packed", _drop("weight_scale"), "down_proj.weight_scale' [64, 3] is in none of"),
        ("fp8", _drop("weight_scale"), "down_proj.weight_scale' [1, 1] is in none of"),
        ("packed", _spoil("weight_scale", float("nan")), "weight_scale' has values that are NaN"),
        ("gptq-act-order", _spoil("g_idx", 3), "g_idx has values from 0 to 3; of 3 groups"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(
    name: str,
    edit: Callable[[dict[str, Any]], Any],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    runner_of: Any,
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        runner_of(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says", "message"),
    [
        ("gptq", {"group_size": 16}, "scales' has shape [2, 64], config.json asks for [4, 64]"),
        ("fp8", {"weight_block_size": [32, 32]}, "weight_scale' has shape [1], config.json asks"),
        ("gptq", {"bits": 8}, "qweight' has shape [8, 64], config.json asks for [16, 64]"),
    ],
)
def test_a_config_that_says_something_else_than_the_tensors_is_refused(
    name: str,
    says: dict[str, Any],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    runner_of: Any,
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, name)
    _edit(path, quantization_config=FORMATS[name][0] | says)
    with pytest.raises(CheckpointError) as caught:
        runner_of(path)
    assert message in str(caught.value)


def test_weights_that_are_not_quantised_though_the_config_says_so_are_refused(
    tiny_llama: Path, tmp_path: Path, runner_of: Any
) -> None:
    _, path = quantized_copy(tiny_llama, tmp_path, "fp8")
    _edit(path, quantization_config=FORMATS["fp8"][0])
    with pytest.raises(CheckpointError, match="has type F32; quantization_config says F8_E4M3"):
        runner_of(path)


def test_gptq_lists_its_modules_by_their_last_names(tmp_path: Path) -> None:
    listed = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    raw = {"quantization_config": gptq | {"modules_in_block_to_quantize": listed}}
    stored = read_stored_weights(Fields(raw, tmp_path / "config.json"))
    assert stored is not None
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "shared_mlp.down_proj")
    has = [stored.format_of(f"model.layers.0.{name}") is not None for name in names]
    assert has == [True, False, True, False]


def test_an_older_gptq_checkpoint_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "quantize_config.json").write_text(
        '{"bits": 4, "group_size": 64, "desc_act": true}'
    )
    stored = read_stored_weights(Fields({}, tmp_path / "config.json"))
    assert stored is not None
    found = stored.format_of("model.layers.0.mlp.up_proj")
    assert found is not None
    assert (found.layout, found.block, found.may_lack_order) == ("gptq", (1, 64), False)


def test_modelopt_has_a_file_of_its_own(tiny_llama: Path, tmp_path: Path) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, "modelopt-nvfp4")
    expected = read_model_spec(path).stored
    _edit(path, quantization_config=None)
    assert read_model_spec(path).stored is None
    file = path / "hf_quant_config.json"
    file.write_text(json.dumps({"quantization": FORMATS["modelopt-nvfp4"][0]}))
    assert read_model_spec(path).stored == expected
    file.write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(CheckpointError, match=r"config.json: quanti.*quant_algo='W4A8_AWQ' is not"):
        read_model_spec(path)
    file.write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert read_model_spec(path).stored is None


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("packed", "weight_g_idx"),  # config.json has no actorder
        ("packed", "weight_zero_point"),
        ("modelopt-fp8", "pre_quant_scale"),
        ("modelopt-fp8", "weight_scale_2"),
        ("fp8", "bias"),
    ],
)
def test_a_tensor_that_would_change_the_model_is_refused(
    name: str, added: str, tiny_llama: Path, tmp_path: Path, runner_of: Any
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    tensors[f"model.layers.1.mlp.down_proj.{added}"] = torch.ones(64)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"does not account for: .*down_proj\.{added};"):
        runner_of(path)


def test_tensors_that_change_nothing_are_left_out(
    tiny_llama: Path, tmp_path: Path, runner_of: Any
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, "modelopt-fp8")
    tensors = load_file(path / "model.safetensors")
    for name in (
        *("layers.1.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.k_proj.k_scale"),
        *("mtp_layers.0.input_proj.weight", "layers.2.eh_proj.weight"),
    ):
        tensors[f"model.{name}"] = torch.ones(8)
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(64)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"account for: model\.layers\.2\.eh_proj\.weight;"):
        runner_of(path)
    for name in ("num_nextn_predict_layers", "num_mtp_modules"):  # The latter in MiniMax-M2.
        _edit(path, **{"num_nextn_predict_layers": 0, name: 1})
        runner_of(path)


def test_weights_of_4_bits_are_not_rounded_again(
    tiny_llama: Path, tmp_path: Path, config_of: Any
) -> None:
    path, _ = quantized_copy(tiny_llama, tmp_path, "awq")
    with pytest.raises(ConfigError, match="quantization='int8': the checkpoint's weights have 4"):
        model_facts(config_of(path, quantization="int8"))


def _edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
