"""Quantised checkpoints in the formats of GPTQModel, AutoAWQ, compressed-tensors and ModelOpt.

The formats were once checked against the output of compressed-tensors 0.20 and AutoAWQ 0.2.9.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# O, I a linear layer's output and input   G groups of inputs

GROUP = 32
Packed = tuple[dict[str, Tensor], Tensor]
"""Packed tensors by the last part of their name, and the matrix that they decode to."""


def integers(values: Tensor, bits: int) -> Tensor:
    """Packs ``[..., 32 / bits * n]`` to int32 ``[..., n]``, the first value in the lowest bits."""
    parts = values.long().reshape(*values.shape[:-1], -1, 32 // bits)
    packed = sum(parts[..., i] << (bits * i) for i in range(32 // bits))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def grouped(weight_OI: Tensor, *, bits: int = 4, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises to codes ``[O, I]``, and scales and zero points ``[O, G]``."""
    groups_OGL = weight_OI.reshape(len(weight_OI), -1, GROUP)
    most = (1 << bits) - 1
    if symmetric:
        scale_OG = (groups_OGL.abs().amax(-1) / (most // 2)).half()
        zero_OG = torch.full_like(scale_OG, (most + 1) // 2)
    else:
        low_OG = groups_OGL.amin(-1).clamp(max=0)
        scale_OG = ((groups_OGL.amax(-1).clamp(min=0) - low_OG) / most).half()
        zero_OG = (-low_OG / scale_OG).round()
    codes = (groups_OGL / scale_OG[..., None] + zero_OG[..., None]).round().clamp(0, most)
    return codes.flatten(1).long(), scale_OG, zero_OG.long()


def _meant(code_OI: Tensor, scale_OG: Tensor, zero_OG: Tensor) -> Tensor:
    codes_OGL = code_OI.view(*zero_OG.shape, -1)
    return ((codes_OGL - zero_OG[..., None]).float() * scale_OG.float()[..., None]).flatten(1)


def gptq(weight_OI: Tensor, *, bits: int = 4, version: int = 1, act_order: bool = False) -> Packed:
    num_in = weight_OI.shape[1]
    order_I = torch.arange(num_in)
    if act_order:
        order_I = torch.randperm(num_in, generator=torch.Generator().manual_seed(0))
    code_OI, scale_OG, zero_OG = grouped(weight_OI[:, order_I], bits=bits, symmetric=False)
    meant_OI = _meant(code_OI, scale_OG, zero_OG)
    back_I = order_I.argsort()
    qzeros = integers(zero_OG.T, bits)
    if version == 1:  # minus 1 as whole 32-bit words, so that a 0 borrows
        qzeros = qzeros - sum(1 << shift for shift in range(0, 32, bits))
    tensors = {
        "qweight": integers(code_OI[:, back_I], bits).T.contiguous(),
        "qzeros": qzeros,
        "scales": scale_OG.T.contiguous(),
        "g_idx": (back_I // GROUP).to(torch.int32),
    }
    return tensors, meant_OI[:, back_I]


def awq(weight_OI: Tensor) -> Packed:
    code_OI, scale_OG, zero_OG = grouped(weight_OI, symmetric=False)

    def pack(values: Tensor) -> Tensor:
        eights = values.reshape(len(values), -1, 8)
        return integers(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    tensors = {
        "qweight": pack(code_OI.T),
        "qzeros": pack(zero_OG.T),
        "scales": scale_OG.T.contiguous(),
    }
    return tensors, _meant(code_OI, scale_OG, zero_OG)


def packed(
    weight_OI: Tensor, *, symmetric: bool = True, bits: int = 4, in_order: bool = True
) -> Packed:
    """compressed-tensors' format. Without ``in_order``, groups consist of scattered inputs."""
    num_in = weight_OI.shape[1]
    order_I = torch.arange(num_in)
    if not in_order:
        order_I = torch.randperm(num_in, generator=torch.Generator().manual_seed(0))
    code_OI, scale_OG, zero_OG = grouped(weight_OI[:, order_I], bits=bits, symmetric=symmetric)
    meant_OI, back_I = _meant(code_OI, scale_OG, zero_OG), order_I.argsort()
    tensors = {
        "weight_packed": integers(code_OI[:, back_I], bits),
        "weight_scale": scale_OG,
        "weight_shape": torch.tensor(weight_OI.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = integers(zero_OG.T, bits).T.contiguous()
    if not in_order:
        tensors["weight_g_idx"] = (back_I // GROUP).to(torch.int32)
    return tensors, meant_OI[:, back_I]


def int8(weight_OI: Tensor) -> Packed:
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    values = (weight_OI / scale_O1).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale_O1}, values * scale_O1


def float8(weight_OI: Tensor, *, scale: str = "weight_scale", block: int = 0) -> Packed:
    """A scale for each square of ``block`` rows; if 0, for each output; if -1, one for all."""
    num_out, num_in = weight_OI.shape
    blocks = weight_OI.abs()
    if block == 0:
        scale_whole = blocks.amax(1, keepdim=True)
    elif block < 0:
        scale_whole = blocks.amax().view(1)
    else:
        scale_whole = torch.nn.functional.max_pool2d(blocks[None], block, ceil_mode=True)[0]
    scale_whole = scale_whole / 448
    spread = scale_whole
    if block > 0:
        spread = scale_whole.repeat_interleave(block, 0).repeat_interleave(block, 1)
        spread = spread[:num_out, :num_in]
    values = (weight_OI / spread).to(torch.float8_e4m3fn)
    return {"weight": values, scale: scale_whole}, values.float() * spread


def nvfp4(weight_OI: Tensor) -> Packed:
    """Two 4-bit values a byte, an 8-bit scale for each 16 values of a row, and a global scale."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups_OGL = weight_OI.reshape(len(weight_OI), -1, 16)
    scale = groups_OGL.abs().amax() / (6 * 448)
    scale_OG = (groups_OGL.abs().amax(-1) / 6 / scale).to(torch.float8_e4m3fn)
    unit_OGL = groups_OGL / (scale_OG.float() * scale)[..., None]
    index = (unit_OGL.abs()[..., None] - levels).abs().argmin(-1)
    meant_OGL = levels[index] * unit_OGL.sign() * (scale_OG.float() * scale)[..., None]
    codes = (index + 8 * (unit_OGL < 0)).flatten(1).to(torch.uint8)
    tensors = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale_OG,
        "weight_scale_2": scale,
        "input_scale": torch.tensor(0.5),
    }
    return tensors, meant_OGL.flatten(1)


def compressed_nvfp4(weight_OI: Tensor) -> Packed:
    """compressed-tensors' names, and a global scale that divides."""
    parts, meant_OI = nvfp4(weight_OI)
    tensors = {
        "weight_packed": parts["weight"],
        "weight_scale": parts["weight_scale"],
        "weight_global_scale": 1 / parts["weight_scale_2"].view(1),
        "input_global_scale": torch.tensor([0.5]),
    }
    return tensors, meant_OI


def mxfp4(weight_OI: Tensor) -> Packed:
    """Two 4-bit values a byte, and the exponent of a power of two for each 32 values of a row."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    exponent_OG, groups_OGL = _exponents(weight_OI, most=6)
    unit_OGL = groups_OGL / 2.0 ** (exponent_OG - 127)[..., None]
    index = (unit_OGL.abs()[..., None] - levels).abs().argmin(-1)
    meant_OGL = levels[index] * unit_OGL.sign() * 2.0 ** (exponent_OG - 127)[..., None]
    codes = (index + 8 * (unit_OGL < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": exponent_OG.byte()}, meant_OGL.flatten(1)


def mxfp8(weight_OI: Tensor) -> Packed:
    """An 8-bit value each, and the exponent of a power of two for each 32 values of a row."""
    exponent_OG, groups_OGL = _exponents(weight_OI, most=448)
    scale_OG1 = 2.0 ** (exponent_OG - 127)[..., None]
    values_OGL = (groups_OGL / scale_OG1).to(torch.float8_e4m3fn)
    tensors = {"weight": values_OGL.flatten(1), "weight_scale": exponent_OG.byte()}
    return tensors, (values_OGL.float() * scale_OG1).flatten(1)


def _exponents(weight_OI: Tensor, *, most: float) -> tuple[Tensor, Tensor]:
    """Exponents ``[O, G]`` with which no value is above ``most``, and the values in groups."""
    groups_OGL = weight_OI.reshape(len(weight_OI), -1, GROUP)
    return 127 + (groups_OGL.abs().amax(-1) / most).log2().ceil(), groups_OGL


def modelopt_fp8(weight_OI: Tensor) -> Packed:
    tensors, meant_OI = float8(weight_OI, block=-1)
    scale = tensors["weight_scale"].view(())
    return tensors | {"weight_scale": scale, "input_scale": torch.tensor(0.5)}, meant_OI


def devstral(weight_OI: Tensor) -> Packed:
    tensors, meant_OI = float8(weight_OI, scale="weight_scale_inv", block=-1)
    return tensors | {"activation_scale": torch.tensor(0.5)}, meant_OI


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head", "re:.*layers.1.mlp.up_proj"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def _without_order(weight_OI: Tensor) -> Packed:
    parts, meant = gptq(weight_OI)
    return {name: part for name, part in parts.items() if name != "g_idx"}, meant


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
_INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "gptq": (_GPTQ, gptq),
    "gptq-v2": (_GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, version=2)),
    "gptq-8": (_GPTQ | {"bits": 8}, lambda w: gptq(w, bits=8)),
    "gptq-act-order": (_GPTQ | {"desc_act": True}, lambda w: gptq(w, act_order=True)),
    "gptqmodel": (_GPTQ | {"quant_method": "gptqmodel"}, _without_order),
    "auto-round": (
        _GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        gptq,
    ),
    "awq-names": (
        {
            **{"quant_method": "awq", "bits": 4, "group_size": GROUP},
            "modules_to_not_convert": ["layers.1.mlp.up_proj."],
        },
        awq,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "packed": (compressed("pack-quantized", **_INT4), packed),
    "packed-asym": (
        compressed("pack-quantized", **_INT4, symmetric=False),
        lambda w: packed(w, symmetric=False),
    ),
    "packed-order": (
        compressed("pack-quantized", **_INT4, actorder="group"),
        lambda w: packed(w, in_order=False),
    ),
    "packed-8": (
        compressed("pack-quantized", **(_INT4 | {"num_bits": 8})),
        lambda w: packed(w, bits=8),
    ),
    "int8": (compressed("int-quantized", type="int", num_bits=8, strategy="channel"), int8),
    "float8-channel": (
        compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        float8,
    ),
    "float8-tensor": (
        compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
        lambda w: float8(w, block=-1),
    ),
    "float8-block": (
        compressed(
            "float-quantized",
            type="float",
            num_bits=8,
            strategy="block",
            block_structure=[40, 40],
        ),
        lambda w: float8(w, block=40),
    ),
    "fp8-block": (
        {
            "quant_method": "fp8",
            "weight_block_size": [40, 40],
            "modules_to_not_convert": ["layers.1.mlp.up_proj"],
        },
        lambda w: float8(w, scale="weight_scale_inv", block=40),
    ),
    "fp8": ({"quant_method": "fp8"}, lambda w: float8(w, block=-1)),
    "fp8-inv": ({"quant_method": "fp8", "activation_scheme": "static"}, devstral),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*1.mlp.up_proj"]},
        modelopt_fp8,
    ),
    "compressed-mxfp4": (
        compressed("mxfp4-pack-quantized", **(_INT4 | {"type": "float"})),
        mxfp4,
    ),
    "compressed-mxfp8": (
        compressed("mxfp8-quantized", **(_INT4 | {"type": "float", "num_bits": 8})),
        mxfp8,
    ),
    "compressed-nvfp4": (
        compressed(
            "nvfp4-pack-quantized",
            **(_INT4 | {"type": "float", "strategy": "tensor_group", "group_size": 16}),
        ),
        compressed_nvfp4,
    ),
    "modelopt-mxfp8": ({"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}, mxfp8),
    "modelopt-nvfp4": ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, nvfp4),
}


def quantized_copy(source: Path, target: Path, name: str) -> tuple[Path, Path]:
    """Writes ``source`` in format ``name``, and the decoded values as an ordinary checkpoint."""
    config, pack = FORMATS[name]
    ignores = "up_proj" in json.dumps(config)

    def pack_of(module: str) -> Callable[[Tensor], Packed] | None:
        is_ignored = ignores and module == "model.layers.1.mlp.up_proj"
        return pack if "_proj" in module and not is_ignored else None

    return mixed_copy(source, target, config, pack_of)


def mixed_copy(
    source: Path,
    target: Path,
    config: dict[str, Any],
    pack_of: Callable[[str], Callable[[Tensor], Packed] | None],
) -> tuple[Path, Path]:
    """Writes ``source`` with each module packed by what ``pack_of`` returns for it, and the decoded
    values as an ordinary checkpoint."""
    paths = target / "packed", target / "meant"
    for path in paths:
        shutil.copytree(source, path)
    tensors, meant = (load_file(source / "model.safetensors") for _ in range(2))
    for each in list(tensors):
        pack = pack_of(each.removesuffix(".weight"))
        if pack is None:
            continue
        parts, meant[each] = pack(tensors.pop(each))
        meant[each] = meant[each].contiguous()
        for suffix, tensor in parts.items():
            tensors[f"{each.removesuffix('weight')}{suffix}"] = tensor.contiguous()
    save_file(tensors, paths[0] / "model.safetensors")
    save_file(meant, paths[1] / "model.safetensors")
    file = paths[0] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return paths
