"""Reads and checks a LoRA adapter in PEFT's format: `CONFIG_NAME` and `WEIGHTS_NAME` in a folder.

The tensors in the file determine which modules are changed; the configuration only gives the scale.
``fan_in_fan_out`` has no effect on linear modules, as in PEFT. An adapter that would be applied
only in part, or incorrectly, is refused by name.

Does not import torch.
"""

import json
import math
import re
import reprlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from quire.worker.model.spec import ModelSpec
from quire.worker.parts.adapters.modules import (
    Module,
    Role,
    find_module,
    modules_of,
    why_refused,
)
from quire.worker.request.errors import AdapterError, CheckpointError
from quire.worker.weights.checkpoint import TensorInfo, read_header, read_json, read_tensors
from quire.worker.weights.patterns import Pattern

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 4 << 20
"""The limit of the weights' header, enough for 12,000 modules. Parsing JSON blocks the process."""

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", re.DOTALL)
_ONLY_TRAINS = re.compile(r".+\.lora_velora_embed(?:\.default)?", re.DOTALL)
"""VeLoRA compresses activations for the backward pass with it; its outputs are LoRA's."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that do not change the base model's weights."""
_REFUSED = {
    "use_dora": "DoRA is not served; train without use_dora",
    "modules_to_save": "whole modules are not served; train without modules_to_save",
    "trainable_token_indices": "trained tokens are not served; train without them",
    "lora_bias": "biases are not served; train without lora_bias",
    "layer_replication": "a model with repeated layers is another model; train without it",
    "alora_invocation_tokens": "an adapter that begins within a prompt is not served",
    "use_qalora": "QALoRA is not served; train without use_qalora",
    "kasa_config": "KaSA changes the model's own weights; merge it into the model, and serve that",
    "use_bdlora": "block-diagonal LoRA is not served; train without use_bdlora",
    "monteclora_config": "MonteCLoRA is not served; train without monteclora_config",
    "arrow_config": "a mixture of adapters is not served; serve one of them",
}
_MAX_PATTERNS, _MAX_PATTERN_CHARS = 2000, 100_000  # PEFT may write one for each module.
_MOST = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}
"""The largest magnitude of a value for each type of computation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """The fields of `CONFIG_NAME` that determine the scale of ``B A``."""

    rank: int
    alpha: float
    use_rslora: bool = False
    ranks: tuple[tuple[Pattern, float], ...] = ()
    """Ranks of particular modules; the first pattern that matches counts."""
    alphas: tuple[tuple[Pattern, float], ...] = ()

    def rank_of(self, path: str) -> float:
        return _first(self.ranks, path, self.rank)

    def scale_of(self, path: str) -> float:
        """The factor on ``B A`` of the module ``path``."""
        rank, alpha = self.rank_of(path), _first(self.alphas, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """An adapter's update of one module: ``scale`` times ``B A``."""

    module: Module
    scale: float
    a: TensorInfo
    """``[rank, in_size]``"""
    b: TensorInfo
    """``[out_size, rank]``"""


def read_config(folder: Path) -> PeftConfig:
    """Reads `CONFIG_NAME` in ``folder``.

    Raises:
        AdapterError: It is missing or damaged, or the adapter is of an unsupported kind.
    """
    file = folder / CONFIG_NAME
    try:
        raw = read_json(file, max_bytes=MAX_CONFIG_BYTES)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error

    def refused(name: str, remedy: str) -> AdapterError:
        return AdapterError(f"{file}: {name}={raw.get(name)!r}: {remedy}")

    if raw.get("peft_type") != "LORA":
        raise refused("peft_type", "only LoRA adapters are served, whose peft_type is 'LORA'")
    for name, remedy in _REFUSED.items():
        if raw.get(name):
            raise refused(name, remedy)
    if raw.get("bias", "none") != "none":
        raise refused("bias", "biases are not served; train with bias='none'")
    if not any(raw.get("init_lora_weights") is each for each in _PLAIN_STARTS[:3]) and (
        raw["init_lora_weights"] not in _PLAIN_STARTS[3:]
    ):
        raise refused(
            "init_lora_weights",
            "it belongs to weights that the training has changed; save it again with "
            "path_initial_model_for_weight_conversion, which makes it an adapter of the model",
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise refused("r", "must be an integer of 1 or more")
    if not _is_number(alpha):
        raise refused("lora_alpha", "must be a number")
    patterns = []
    for name in ("rank_pattern", "alpha_pattern"):
        try:
            patterns.append(_patterns(raw.get(name) or {}, is_rank=name == "rank_pattern"))
        except ValueError as error:
            raise AdapterError(f"{file}: {name}: {error}") from None
    return PeftConfig(
        rank=rank,
        alpha=alpha,
        use_rslora=bool(raw.get("use_rslora")),
        ranks=patterns[0],
        alphas=patterns[1],
    )


def read_parts(folder: Path, spec: ModelSpec, *, max_rank: int) -> tuple[Part, ...]:
    """The updates of the adapter in ``folder``, in the order of the model's layers.

    Reads only the configuration and the header of the weights.

    Raises:
        AdapterError: The files are missing or damaged, or the adapter is of an unsupported kind.
    """
    config, file = read_config(folder), folder / WEIGHTS_NAME
    tensors = _tensors(folder)
    modules = modules_of(spec)
    halves: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        if _ONLY_TRAINS.fullmatch(name):
            continue
        match = _TENSOR.fullmatch(name)
        path = match[1] if match else name.removeprefix("base_model.model.")
        path = path.removesuffix(".weight")
        if match is None or find_module(modules, path) is None:
            raise AdapterError(f"{file}: tensor {name!r}: {_why(spec, name, path)}")
        if match[2] in halves[path]:
            raise AdapterError(f"{file}: tensor {name!r} is there twice, as {path}")
        halves[path][match[2]] = info
    parts: dict[tuple[str, Role], Part] = {}
    for path, pair in halves.items():
        module = find_module(modules, path)
        assert module is not None
        part = _part(file, path, module, pair, config, max_rank=max_rank)
        key = (module.layer, module.roles[0])
        if key in parts:
            raise AdapterError(f"{file}: {path} has a second adapter under another name")
        parts[key] = part
    if not parts:
        raise AdapterError(f"{file}: has no tensors; was the adapter saved by save_pretrained?")
    order = {(each.layer, each.roles[0]): place for place, each in enumerate(modules.values())}
    return tuple(parts[key] for key in sorted(parts, key=order.__getitem__))


def check_adapter(folder: Path, spec: ModelSpec, *, max_rank: int, dtype: str) -> None:
    """Checks every value of an adapter. This also brings its files into the page cache.

    ``dtype`` is the model's type of computation.

    Raises:
        AdapterError: As `read_parts`, or a value is NaN or is infinite in ``dtype``.
    """
    parts = read_parts(folder, spec, max_rank=max_rank)
    file = folder / WEIGHTS_NAME
    try:
        content = np.memmap(file, np.uint8, mode="r")
        begin = 8 + int(content[:8].view("<u8")[0])
        header = json.loads(content[8:begin].tobytes())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file}: {error}") from error
    for info in (each for part in parts for each in (part.a, part.b)):
        first, last = header[info.name]["data_offsets"]
        values = _as_float32(content[begin + first : begin + last], info.dtype)
        if not np.abs(values).max() <= _MOST[dtype]:  # False for NaN.
            raise AdapterError(
                f"{file}: tensor {info.name!r} has values that are NaN, or infinite as {dtype}; "
                "its training diverged, or the file is damaged: get a sound copy"
            )


def check_files(folder: Path) -> None:
    """Raises AdapterError if there are no weights in ``folder``."""
    file = folder / WEIGHTS_NAME
    if not file.exists():
        others = sorted(each.name for each in folder.glob("adapter_model.*"))
        found = f"; {', '.join(others)} is of a format that is not read" if others else ""
        raise AdapterError(
            f"{file}: there is no such file{found}; save the adapter by save_pretrained"
        )


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    check_files(folder)
    file = folder / WEIGHTS_NAME
    try:
        tensors = read_tensors(file, max_header_bytes=MAX_HEADER_BYTES)
        header = json.loads(read_header(file, max_bytes=MAX_HEADER_BYTES))
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    for name, info in tensors.items():
        begin, end = header[name]["data_offsets"]
        size = _ITEM_BYTES.get(info.dtype)
        if size is None:
            raise AdapterError(
                f"{file}: tensor {name!r} has type {info.dtype}; it must be F32, BF16 or F16"
            )
        if end - begin != size * math.prod(info.shape):
            raise AdapterError(
                f"{file}: tensor {name!r} has {end - begin} bytes, and the shape "
                f"{list(info.shape)} of {info.dtype}: the file is damaged, get it again"
            )
    return tensors


def _part(
    file: Path,
    path: str,
    module: Module,
    pair: dict[str, TensorInfo],
    config: PeftConfig,
    *,
    max_rank: int,
) -> Part:
    for half in "AB":
        if half not in pair:
            raise AdapterError(
                f"{file}: {path} has no lora_{half}, the other half of its adapter: the file is "
                "not whole, get it again"
            )
    rank = config.rank_of(path)
    if rank > max_rank:
        raise AdapterError(
            f"{file}: {path} has rank {rank:g}, max_lora_rank is {max_rank}: set "
            f"max_lora_rank={rank:g} (256 at most), or train with a smaller r"
        )
    for half, shape in (("A", (rank, module.in_size)), ("B", (module.out_size, rank))):
        if pair[half].shape != shape:
            raise AdapterError(
                f"{file}: tensor {pair[half].name!r} has shape {list(pair[half].shape)}, where "
                f"{CONFIG_NAME} and the model ask for {[int(size) for size in shape]}: is the "
                "adapter for this model?"
            )
    scale = config.scale_of(path)
    if not math.isfinite(scale):
        raise AdapterError(f"{file}: {path}: the scale is {scale}; lora_alpha must be finite")
    return Part(module=module, scale=scale, a=pair["A"], b=pair["B"])


def _why(spec: ModelSpec, name: str, path: str) -> str:
    if name.endswith("lora_magnitude_vector") or "lora_magnitude_vector." in name:
        return _REFUSED["use_dora"]
    if "lora_embedding_" in name:
        return why_refused(spec, spec.names.embedding)
    if name.endswith((f"{spec.names.lm_head}.weight", f"{spec.names.embedding}.weight")):
        return (
            "the vocabulary's weights are the model's; if the training did not change them, save "
            "with save_embedding_layers=False"
        )
    if ".lora_" not in name:
        return "not a part of a LoRA adapter; train without modules_to_save"
    if name.endswith(".bias"):
        return _REFUSED["lora_bias"]
    return why_refused(spec, path)


def _patterns(raw: Any, *, is_rank: bool) -> tuple[tuple[Pattern, float], ...]:
    """A table of module patterns. PEFT matches names by regular expressions.

    Raises:
        ValueError: It is not such a table.
    """
    if not isinstance(raw, dict) or len(raw) > _MAX_PATTERNS:
        raise ValueError(f"must be an object of {_MAX_PATTERNS} names at most")
    if sum(map(len, raw)) > _MAX_PATTERN_CHARS:
        raise ValueError(f"must have {_MAX_PATTERN_CHARS} characters at most")
    found = []
    for pattern, value in raw.items():
        is_good = type(value) is int and value >= 1 if is_rank else _is_number(value)
        if not is_good:
            raise ValueError(f"{value!r} of {pattern!r} must be a number above 0")
        try:
            found.append((Pattern(rf"(.*\.)?({pattern})$"), value))
        except ValueError as error:
            raise ValueError(
                f"{reprlib.repr(pattern)} is no regular expression that RE2 takes ({error}): name "
                "the modules"
            ) from None
    return tuple(found)


def _first(table: tuple[tuple[Pattern, float], ...], path: str, default: float) -> float:
    return next((value for pattern, value in table if pattern.matches(path)), default)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _as_float32(content: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (content.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return content.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)
