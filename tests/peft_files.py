"""LoRA adapters of small models in PEFT's file format, and their merge into transformers' models:
the low-rank products are added to the weights."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

EVERYWHERE = r".*\.(\w*(q|k|v|o|qkv|gate|up|down|gate_up)_proj|c_fc|c_proj)"
ATTENTION = ("q_proj", "v_proj")
_UNSERVED = re.compile(r"\.experts\.|\.router$|\.mlp\.gate$|shared_expert_gate$")


def write(
    folder: Path,
    model: nn.Module,
    *,
    seed: int,
    rank: int = 8,
    targets: str | Sequence[str] = EVERYWHERE,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """Writes a random adapter, large enough to change tokens. ``config`` has more fields of
    ``adapter_config.json``; ranks follow its ``rank_pattern``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or _UNSERVED.search(name) or not _is_in(targets, name):
            continue
        own = _of(config.get("rank_pattern", {}), name, rank)
        for half, shape in (
            ("A", (own, module.in_features)),
            ("B", (module.out_features, own)),
        ):
            values = torch.randn(shape, generator=generator) * size / math.sqrt(own)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    assert tensors, targets
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    listed = targets if isinstance(targets, str) else list(targets)
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    fields |= {"bias": "none", "target_modules": listed, "fan_in_fan_out": False} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


@torch.no_grad()
def merge(model: nn.Module, folder: Path) -> nn.Module:
    """Adds the adapter to the model's weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a_RI in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank = _of(config.get("rank_pattern", {}), module, config["r"])
        assert rank == len(a_RI)
        alpha = _of(config.get("alpha_pattern", {}), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        b_OR = tensors[name.replace(".lora_A.", ".lora_B.")]
        weight_OI = model.get_submodule(module).weight
        assert isinstance(weight_OI, torch.Tensor)
        weight_OI += scale * (b_OR.double() @ a_RI.double()).to(weight_OI.dtype)
    return model


def _is_in(targets: str | Sequence[str], name: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in targets)


def _of(table: dict[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in table.items() if name.endswith(key)), default)
