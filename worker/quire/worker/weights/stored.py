"""Reads how a checkpoint stores quantised matrices from its ``quantization_config``: GPTQ, AWQ, fp8
(as in DeepSeek and Qwen), MXFP4 (as in gpt-oss), compressed-tensors, and ModelOpt, which may have a
file of its own. Does not import torch.

The libraries of those names define the fields. Fields and values that are not read are refused.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import read_json
from quire.worker.weights.fields import Fields
from quire.worker.weights.patterns import of_wildcards, pattern

_INSTEAD = "; serve a checkpoint that is not quantized (quantization='w4' or 'int8' rounds it)"
_LM_HEAD = "lm_head"
MODELOPT_NAME = "hf_quant_config.json"
_OLD_GPTQ_NAME = "quantize_config.json"
_GPTQ_MODULES = "modules_in_block_to_quantize"
_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of scales; both multiply. Writers of fp8 without blocks use either name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The storage format of the matrices of linear layers, except the ignored ones."""

    layout: Literal["gptq", "awq", "packed", "int8", "float8", "nvfp4", "q4_0", "mxfp4"]
    """The first three pack several integers into 32 bits. "q4_0" is GGUF's. "mxfp4" is for experts
    only."""
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    """How many outputs and inputs share a scale; 0 means all."""
    symmetric: bool = True
    scale: str = "weight_scale"
    """The name of the tensor of scales."""
    zero_offset: int = 0
    """Added to stored zero points."""
    order: str | None = None
    """The name of the tensor that maps inputs to groups; ``None`` if groups are consecutive."""
    may_lack_order: bool = False
    """Whether groups are consecutive in a checkpoint without such tensors."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: parts of names, or regular expressions after ``re:``."""
    modules: tuple[str, ...] | None = None
    """The modules that are quantised, if they are listed."""
    endings: tuple[str, ...] | None = None
    """The last parts of the names of modules that are quantised, if they are listed."""

    def named_as_in(self, names: Iterable[str]) -> "StoredWeights":
        """A copy whose tensors of scales and of orders are those in ``names``, the tensor names."""
        endings = {name.rpartition(".")[2] for name in names}
        if self.may_lack_order and self.order not in endings:
            return replace(self, order=None)
        if self.scale in _SCALES:
            for scale in _SCALES:
                if scale in endings and self.scale not in endings:
                    return replace(self, scale=scale)
        return self

    def has(self, module: str) -> bool:
        """Whether ``module``, which is one matrix, is stored in this format."""
        if self.modules is not None:
            return module in self.modules
        if self.endings is not None and not f".{module}".endswith(self.endings):
            return False
        return self.layout != "mxfp4" and not any(_matches(module, each) for each in self.ignored)


def read_stored_weights(config: Fields) -> StoredWeights | None:
    """The storage format of a checkpoint; ``None`` if it is not quantised. ModelOpt's own file is
    used if ``config.json`` has no quantization.

    Raises:
        CheckpointError: It is quantised in an unsupported way.
    """
    fields, file = config.section("quantization_config"), config.file.with_name(MODELOPT_NAME)
    if not fields.raw and file.is_file():
        fields = Fields(read_json(file), file).section("quantization")
    older = config.file.with_name(_OLD_GPTQ_NAME)
    if not fields.raw and older.is_file():
        fields = Fields({"quant_method": "gptq"} | read_json(older), older)
    if not fields.raw:
        return None
    if "quant_algo" in fields.raw:
        # Only the KV cache may be quantised, which is up to the engine.
        return None if fields.raw["quant_algo"] is None else _modelopt(fields)
    method = _one_of(fields, "quant_method", tuple(_METHODS))
    return _METHODS[method](fields)


def _gptq(fields: Fields) -> StoredWeights:
    bits = _one_of(fields, "bits", (4, 8))
    version = _one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    for name in ("dynamic", "pack_dtype", "is_marlin_format"):
        if fields.raw.get(name) not in (None, {}, "int32", False):
            raise _refused(fields, name, fields.raw[name])
    endings = None
    if listed := fields.raw.get(_GPTQ_MODULES):
        listed = listed if isinstance(listed, list) else [0]
        names = [name for part in listed for name in (part if isinstance(part, list) else [part])]
        if not all(isinstance(name, str) for name in names):
            raise fields.wrong(_GPTQ_MODULES, listed, "a list of names, or of lists of names")
        endings = tuple(f".{name}" for name in names)
    return StoredWeights(
        layout="gptq",
        bits=bits,
        block=(1, _group_size(fields, "group_size")),
        symmetric=False,
        scale="scales",
        zero_offset=1 if version == "gptq" else 0,
        order="g_idx",
        may_lack_order=not fields.flag("desc_act"),
        ignored=() if fields.flag("lm_head") else (_LM_HEAD,),
        endings=endings,
    )


def _auto_round(fields: Fields) -> StoredWeights:
    """AutoRound's name for files that are packed as GPTQ's."""
    _one_of(fields, "packing_format", ("auto_round:auto_gptq",))
    if fields.raw.get("extra_config"):
        raise _refused(fields, "extra_config", fields.raw["extra_config"])
    return _gptq(fields)


def _awq(fields: Fields) -> StoredWeights:
    bits = "w_bit" if "w_bit" in fields.raw else "bits"
    group = "q_group_size" if "q_group_size" in fields.raw else "group_size"
    _one_of(fields, bits, (4,))
    _one_of(fields, "version", ("gemm", "GEMM"), default="gemm")
    _one_of(fields, "zero_point", (True,), default=True)
    return StoredWeights(
        layout="awq",
        bits=4,
        block=(1, _group_size(fields, group)),
        symmetric=False,
        scale="scales",
        ignored=(_LM_HEAD, *fields.names("modules_to_not_convert")),
    )


def _fp8(fields: Fields) -> StoredWeights:
    _one_of(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    ignored = fields.names("modules_to_not_convert") or fields.names("ignored_layers")
    block = fields.raw.get("weight_block_size")
    return StoredWeights(
        layout="float8",
        block=(0, 0) if block is None else _block_of(fields, "weight_block_size"),
        scale="weight_scale" if block is None else "weight_scale_inv",
        ignored=(_LM_HEAD, *ignored),
    )


def _mxfp4(fields: Fields) -> StoredWeights:
    fields.names("modules_to_not_convert")  # all but the experts
    return StoredWeights(layout="mxfp4", bits=4, block=(1, 32), scale="scales")


def _compressed_tensors(fields: Fields) -> StoredWeights:
    groups = fields.section("config_groups").raw
    if len(groups) != 1:
        raise _refused(fields, "config_groups", sorted(groups), "; one group is")
    (name,) = groups
    group = fields.section("config_groups").section(name)
    if group.names("targets") != ["Linear"]:
        raise _refused(group, "targets", group.raw.get("targets"), "; ['Linear'] is")
    weights = group.section("weights")
    kind, bits = weights.raw.get("type"), weights.raw.get("num_bits")
    formats = {
        ("pack-quantized", "int", 4): "packed",
        ("pack-quantized", "int", 8): "packed",
        ("int-quantized", "int", 8): "int8",
        ("float-quantized", "float", 8): "float8",
        ("naive-quantized", "int", 8): "int8",
        ("naive-quantized", "float", 8): "float8",
    }
    stored_as = group.raw.get("format") or fields.raw.get("format")
    layout: Any = formats.get((str(stored_as), str(kind), bits if type(bits) is int else 0))
    if layout is None:
        known = ", ".join(f"{form!r} of {size}-bit {type_}" for form, type_, size in formats)
        raise fields.broken(
            f"quantization_config.format={stored_as!r} of {bits!r}-bit {kind} is not supported; "
            f"supported: {known}{_INSTEAD}"
        )
    _one_of(fields, "quantization_status", ("compressed",), default="compressed")
    for section in ("sparsity_config", "transform_config"):
        if _is_used(fields.raw.get(section)):
            raise _refused(fields, section, fields.raw[section])
    blocks: dict[str, Callable[[], tuple[int, int]]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "group": lambda: (1, _group_size(weights, "group_size")),
        "block": lambda: _block_of(weights, "block_structure"),
    }
    strategy = _one_of(weights, "strategy", tuple(blocks))
    orders = (None, False, True, "weight", "static", "group", "dynamic")
    has_order = _one_of(weights, "actorder", orders) in (True, "group", "dynamic")
    for each in fields.names("ignore"):
        try:
            pattern(each.removeprefix("re:"))
        except ValueError as error:
            raise fields.wrong("ignore", each, f"a regular expression ({error})") from error
    return StoredWeights(
        layout=layout,
        bits=weights.count("num_bits"),
        block=blocks[strategy](),
        symmetric=weights.flag("symmetric", default=True),
        order="weight_g_idx" if has_order else None,
        ignored=tuple(fields.names("ignore")),
    )


def _modelopt(fields: Fields) -> StoredWeights:
    """ModelOpt's format: one algorithm for all layers; module names may have ``*``."""
    algorithm = _one_of(fields, "quant_algo", ("FP8", "NVFP4"))
    patterns = (*fields.names("exclude_modules"), *fields.names("ignore"))
    ignored = (f"re:{of_wildcards(each)}" if "*" in each else each for each in patterns)
    is_fp8 = algorithm == "FP8"
    return StoredWeights(
        layout="float8" if is_fp8 else "nvfp4",
        bits=8 if is_fp8 else 4,
        block=(0, 0) if is_fp8 else (1, fields.count("group_size", default=16)),
        ignored=tuple(ignored),
    )


_METHODS: dict[str, Callable[[Fields], StoredWeights]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "gptqmodel": _gptq,
    "mxfp4": _mxfp4,
}


def _is_used(section: object) -> bool:
    """Whether a section has any effect: some writers leave one that says "dense"."""
    return bool(section) and not (isinstance(section, dict) and section.get("format") == "dense")


def _one_of(fields: Fields, name: str, known: tuple[Any, ...], *, default: object = None) -> Any:
    value = fields.raw.get(name, default)
    value = default if value is None else value
    # The types are compared as well, since 1 == True.
    if not any(type(value) is type(each) and value == each for each in known):
        raise _refused(fields, name, value, f"; supported: {', '.join(map(repr, known))}")
    return value


def _group_size(fields: Fields, name: str) -> int:
    """The inputs per group; 0 for all of them, which is -1 in the file."""
    if fields.raw.get(name) == -1:
        return 0
    size = fields.count(name)
    if size % 8:
        raise fields.wrong(name, size, "a multiple of 8, or -1")
    return size


def _block_of(fields: Fields, name: str) -> tuple[int, int]:
    rows, columns = fields.numbers(name, count=2)
    if rows % 1 or columns % 1:
        raise fields.wrong(name, [rows, columns], "two integers")
    return int(rows), int(columns)


def _refused(fields: Fields, name: str, value: object, instead: str = "") -> CheckpointError:
    return fields.refused(f"quantization_config.{name}", value, instead + _INSTEAD)


def _matches(module: str, ignored: str) -> bool:
    if ignored.startswith("re:"):
        return pattern(ignored[3:]).matches(module)
    return f".{ignored.strip('.')}." in f".{module}."
