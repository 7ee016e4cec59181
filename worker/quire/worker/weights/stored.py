"""Reads how a checkpoint stores quantised matrices from its ``quantization_config``: GPTQ, AWQ, fp8
(as in DeepSeek and Qwen), MXFP4 (as in gpt-oss), compressed-tensors, and ModelOpt, which may have a
file of its own. Does not import torch.

The libraries of those names define the fields. Fields and values that are not read are refused.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import read_json
from quire.worker.weights.fields import Fields
from quire.worker.weights.patterns import of_wildcards, pattern

_INSTEAD = "; serve a checkpoint that is not quantized (quantization='w4' or 'int8' rounds it)"
MODELOPT_NAME = "hf_quant_config.json"
_OLD_GPTQ_NAME = "quantize_config.json"
_GPTQ_MODULES = "modules_in_block_to_quantize"
_LM_HEAD = "lm_head"
_EVERY = "Linear"
"""The target that stands for each matrix of a linear layer."""
_EXPRESSION = "re:"
"""How a target that is a regular expression begins."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of scales; both multiply. Writers of fp8 without blocks use either name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """The storage format of a quantised matrix."""

    layout: Literal["gptq", "awq", "packed", "int8", "float8", "float4", "q4_0"]
    """The first three pack several integers into 32 bits, "float4" two values (E2M1) into 8. "q4_0"
    is GGUF's."""
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    """How many outputs and inputs share a scale; 0 means all."""
    symmetric: bool = True
    codes: str = "weight"
    """The name of the tensor of values, if the layout does not say it."""
    scale: str = "weight_scale"
    """The name of the tensor of scales."""
    are_powers: bool = False
    """Whether scales are powers of two, of which 8-bit exponents are stored (E8M0)."""
    global_scale: str | None = None
    """The name of one more scale, for the whole matrix."""
    divides: bool = False
    """Whether the global scale divides the others, and does not multiply them."""
    zero_offset: int = 0
    """Added to stored zero points."""
    order: str | None = None
    """The name of the tensor that maps inputs to groups; ``None`` if groups are consecutive."""
    may_lack_order: bool = False
    """Whether groups are consecutive in a checkpoint without such tensors."""

    def named_as_in(self, endings: set[str]) -> "StoredFormat":
        """A copy whose tensors of scales and of orders are those in ``endings``, the last parts of
        tensor names."""
        if self.may_lack_order and self.order not in endings:
            return replace(self, order=None)
        if self.scale in _SCALES:
            for scale in _SCALES:
                if scale in endings and self.scale not in endings:
                    return replace(self, scale=scale)
        return self


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Which matrices of a checkpoint are quantised, and how. Compared and hashed by value."""

    formats: tuple[tuple[str, StoredFormat | None], ...] = ()
    """The format of the modules that each target stands for; ``None``: they are not quantised.

    A target is a whole name or whole parts of one, a regular expression after ``re:``, or `_EVERY`.
    If several stand for a module, the longest name counts, else the first expression in
    alphabetical order, else `_EVERY` (as in compressed-tensors).
    """
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised whatever ``formats`` says: names, parts, or expressions."""
    has_mxfp4_experts: bool = False
    """Whether all experts of a layer are one tensor in MXFP4, as in gpt-oss."""

    @property
    def has_4_bits(self) -> bool:
        return self.has_mxfp4_experts or self.least_bits == 4

    @property
    def least_bits(self) -> int:
        """The bits of the smallest format."""
        return min([each.bits for _, each in self.formats if each is not None], default=8)

    def named_as_in(self, names: Iterable[str]) -> "StoredWeights":
        """A copy whose formats name tensors as in ``names``, the tensor names."""
        endings = {name.rpartition(".")[2] for name in names}
        formats = ((target, each and each.named_as_in(endings)) for target, each in self.formats)
        return replace(self, formats=tuple(formats))

    def format_of(self, *names: str) -> StoredFormat | None:
        """The format of a module, which is one matrix; ``None`` if it is not quantised. ``names``:
        the module's name in its decoder, and in its files if that is another."""
        if any(_matches(name, each) for name in names for each in self.ignored):
            return None
        parts = sorted({part for name in names for part in _parts(name)}, key=len, reverse=True)
        named = next((part for part in parts if part in self._by_target), None)
        if named is None:
            told = (
                each for each in self._expressions if any(_matches(name, each) for name in names)
            )
            named = next(told, _EVERY)
        return self._by_target.get(named)

    @cached_property
    def _by_target(self) -> dict[str, StoredFormat | None]:
        return dict(self.formats)

    @cached_property
    def _expressions(self) -> list[str]:
        return sorted(target for target in self._by_target if target.startswith(_EXPRESSION))


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
    targets = [_EVERY]
    if listed := fields.raw.get(_GPTQ_MODULES):
        listed = listed if isinstance(listed, list) else [0]
        names = [name for part in listed for name in (part if isinstance(part, list) else [part])]
        if not all(isinstance(name, str) for name in names):
            raise fields.wrong(_GPTQ_MODULES, listed, "a list of names, or of lists of names")
        targets = names
    stored = StoredFormat(
        layout="gptq",
        bits=bits,
        block=(1, _group_size(fields, "group_size")),
        symmetric=False,
        scale="scales",
        zero_offset=1 if version == "gptq" else 0,
        order="g_idx",
        may_lack_order=not fields.flag("desc_act"),
    )
    ignored = () if fields.flag("lm_head") else (_LM_HEAD,)
    return StoredWeights(formats=tuple((each, stored) for each in targets), ignored=ignored)


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
    stored = StoredFormat(
        layout="awq",
        bits=4,
        block=(1, _group_size(fields, group)),
        symmetric=False,
        scale="scales",
    )
    ignored = (_LM_HEAD, *fields.names("modules_to_not_convert"))
    return StoredWeights(formats=((_EVERY, stored),), ignored=ignored)


def _fp8(fields: Fields) -> StoredWeights:
    _one_of(fields, "fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    ignored = fields.names("modules_to_not_convert") or fields.names("ignored_layers")
    block = fields.raw.get("weight_block_size")
    stored = StoredFormat(
        layout="float8",
        block=(0, 0) if block is None else _block_of(fields, "weight_block_size"),
        scale="weight_scale" if block is None else "weight_scale_inv",
    )
    return StoredWeights(formats=((_EVERY, stored),), ignored=(_LM_HEAD, *ignored))


def _mxfp4(fields: Fields) -> StoredWeights:
    fields.names("modules_to_not_convert")  # all but the experts
    return StoredWeights(has_mxfp4_experts=True)


def _compressed_tensors(fields: Fields) -> StoredWeights:
    """Each group has a format of its own, and the targets that have it."""
    _one_of(fields, "quantization_status", ("compressed",), default="compressed")
    for section in ("sparsity_config", "transform_config"):
        if _is_used(fields.raw.get(section)):
            raise _refused(fields, section, fields.raw[section])
    groups = fields.section("config_groups")
    if not groups.raw:
        raise _refused(fields, "config_groups", {}, "; one group or more is")
    formats: dict[str, StoredFormat | None] = {}
    for name in groups.raw:
        group = groups.section(name)
        stored = _compressed_format(group, fields.raw.get("format"))
        formats |= dict.fromkeys(_expressions_of(group, "targets"), stored)
    return StoredWeights(
        formats=tuple(formats.items()), ignored=tuple(_expressions_of(fields, "ignore"))
    )


def _expressions_of(fields: Fields, name: str) -> list[str]:
    """A list of names and regular expressions, which are checked."""
    for each in fields.names(name):
        try:
            pattern(each.removeprefix(_EXPRESSION))
        except ValueError as error:
            raise fields.wrong(name, each, f"a regular expression ({error})") from error
    return fields.names(name)


_COMPRESSED: dict[tuple[str, str, int], dict[str, Any]] = {
    ("pack-quantized", "int", 4): {"layout": "packed"},
    ("pack-quantized", "int", 8): {"layout": "packed"},
    ("int-quantized", "int", 8): {"layout": "int8"},
    ("float-quantized", "float", 8): {"layout": "float8"},
    ("naive-quantized", "int", 8): {"layout": "int8"},
    ("naive-quantized", "float", 8): {"layout": "float8"},
    ("mxfp8-quantized", "float", 8): {"layout": "float8", "are_powers": True},
    ("mxfp4-pack-quantized", "float", 4): {
        **{"layout": "float4", "codes": "weight_packed"},
        "are_powers": True,
    },
    ("nvfp4-pack-quantized", "float", 4): {
        **{"layout": "float4", "codes": "weight_packed"},
        **{"global_scale": "weight_global_scale", "divides": True},
    },
}
"""The layout of each format of compressed-tensors with its type and bits."""


def _compressed_format(group: Fields, format: object) -> StoredFormat | None:
    """The format of a group's matrices; ``None`` if it quantises something else. ``format`` is that
    of groups that do not say it."""
    if group.raw.get("weights", {}) is None:
        return None
    weights = group.section("weights")
    kind, bits = weights.raw.get("type"), weights.raw.get("num_bits")
    stored_as = group.raw.get("format") or format
    layout = _COMPRESSED.get((str(stored_as), str(kind), bits if type(bits) is int else 0))
    if layout is None:
        known = ", ".join(f"{form!r} of {size}-bit {type_}" for form, type_, size in _COMPRESSED)
        raise group.broken(
            f"quantization_config.format={stored_as!r} of {bits!r}-bit {kind} is not supported; "
            f"supported: {known}{_INSTEAD}"
        )
    blocks: dict[str, Callable[[], tuple[int, int]]] = {
        "tensor": lambda: (0, 0),
        "channel": lambda: (1, 0),
        "group": lambda: (1, _group_size(weights, "group_size")),
        "tensor_group": lambda: (1, _group_size(weights, "group_size")),
        "block": lambda: _block_of(weights, "block_structure"),
    }
    strategy = _one_of(weights, "strategy", tuple(blocks))
    orders = (None, False, True, "weight", "static", "group", "dynamic")
    has_order = _one_of(weights, "actorder", orders) in (True, "group", "dynamic")
    symmetric = weights.flag("symmetric", default=True)
    if not symmetric and layout["layout"] in ("float8", "float4"):
        raise _refused(weights, "symmetric", symmetric, f" with format={stored_as!r}")
    return StoredFormat(
        **layout,
        bits=weights.count("num_bits"),
        block=blocks[strategy](),
        symmetric=symmetric,
        order="weight_g_idx" if has_order else None,
    )


_MIXED = "MIXED_PRECISION"


def _modelopt(fields: Fields) -> StoredWeights:
    """ModelOpt's formats: one algorithm for all layers, or one for each that is listed, which also
    holds for the modules below it. Module names may have ``*``."""
    known = (*_ALGORITHMS, _MIXED)
    algorithm = _one_of(fields, "quant_algo", known)
    formats: tuple[tuple[str, StoredFormat | None], ...]
    if algorithm == _MIXED:
        # With "fp8", what is not listed is in fp8 as well.
        _one_of(fields, "quant_method", ("modelopt",), default="modelopt")
        layers = fields.section("quantized_layers")
        if not layers.raw:
            raise _refused(fields, "quantized_layers", {}, f" with quant_algo={_MIXED!r}")
        formats = tuple((name, _algorithm(layers.section(name))) for name in layers.raw)
    else:
        formats = ((_EVERY, _algorithm(fields)),)
    patterns = (*fields.names("exclude_modules"), *fields.names("ignore"))
    ignored = (f"{_EXPRESSION}{of_wildcards(each)}" if "*" in each else each for each in patterns)
    return StoredWeights(formats=formats, ignored=tuple(ignored))


_NVFP4: dict[str, Any] = {"layout": "float4", "bits": 4, "global_scale": "weight_scale_2"}
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "FP8": {"layout": "float8"},
    "MXFP8": {"layout": "float8", "block": (1, 32), "are_powers": True},
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}


def _algorithm(fields: Fields) -> StoredFormat:
    stored = StoredFormat(**_ALGORITHMS[_one_of(fields, "quant_algo", tuple(_ALGORITHMS))])
    if stored.layout == "float4":
        return replace(stored, block=(1, fields.count("group_size", default=16)))
    return stored


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


def _parts(name: str) -> Iterator[str]:
    """The whole parts of a name, in each length."""
    parts = name.split(".")
    for begin in range(len(parts)):
        for end in range(begin + 1, len(parts) + 1):
            yield ".".join(parts[begin:end])


def _matches(name: str, target: str) -> bool:
    if target.startswith(_EXPRESSION):
        return pattern(target.removeprefix(_EXPRESSION)).matches(name)
    return f".{target.strip('.')}." in f".{name}."
