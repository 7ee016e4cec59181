"""Reads one rank's weights from safetensors or GGUF files: each rank reads only its own shard."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.kernels.grouped import GroupedWeight, stacked
from quire.kernels.native.linear import NativeLinear
from quire.kernels.ops import LinearLayer
from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import Checkpoint, TensorInfo
from quire.worker.weights.gguf.container import SUFFIX
from quire.worker.weights.stored import StoredFormat, StoredWeights
from quire.worker.weights.unpack import MXFP4_GROUP, Bounds, UnpackError, decode_mxfp4, unpack
from quire.worker.weights.unused import refuse_unused

if TYPE_CHECKING:
    from quire.worker.model.spec import ModelSpec

SUM_PARTS = 4
"""Parts of a sum over heads or MLP channels: any number of ranks that divides it has equal bits."""

_UNQUANTISED, _OR_OTHERS = ("F32", "BF16", "F16"), "F32, BF16 or F16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The part of each tensor that a rank holds."""

    rank: int = 0
    size: int = 1

    def range_of(self, total: int) -> tuple[int, int]:
        """This rank's ``(first, end)`` of ``total`` rows; ranks differ by one row at most."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def num_parts(self, total: int) -> int:
        """The number of parts of this rank's ``total / size`` units that are summed separately.

        If `SUM_PARTS` divides ``total``, all ranks together have that many parts. So the order of
        the whole sum does not depend on the number of ranks.
        """
        parts = math.gcd(total, SUM_PARTS)
        return parts // self.size if parts % self.size == 0 else 1

    def kv_heads(self, num_kv_heads: int) -> tuple[int, int]:
        """This rank's KV heads: its share, or the replicated head that its query heads read."""
        first = num_kv_heads * self.rank // self.size
        return first, first + max(1, num_kv_heads // self.size)


Part = tuple[str, int, tuple[int, int]]
"""A projection's name, its output size and the ``(first, end)`` rows that a rank holds."""


class _Read(NamedTuple):
    """A rank's part of a tensor: as stored in the file (``part``) and as converted (``out``)."""

    file: Path
    name: str
    part: Tensor
    out: Tensor

    def check(self) -> None:
        """Raises CheckpointError: a value is NaN or infinite."""
        if _is_finite(self.out):
            return
        remedy = "the file is damaged, or its training diverged: get a sound copy"
        if _is_finite(self.part):
            remedy = f"they are beyond the range of {self.out.dtype}: set dtype='bfloat16'"
        raise CheckpointError(
            f"{self.file}: tensor {self.name!r} has values that are NaN or infinite as "
            f"{self.out.dtype}; {remedy}"
        )


class Weights:
    """The open files of a checkpoint, whose tensors are read as ``dtype`` onto ``device``.

    Raises CheckpointError: a tensor is missing, misshapen or unreadable, or has NaN or infinity.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: dict[Path, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        stored: StoredWeights | None,
    ) -> None:
        self.checkpoint = checkpoint
        self._files = files
        self.stored = stored and stored.named_as_in(checkpoint.tensors)
        self._unread = set(checkpoint.tensors)
        self.dtype = dtype
        self.device = device
        self._unchecked: list[_Read] = []

    @classmethod
    @contextmanager
    def open(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        stored: StoredWeights | None = None,
    ) -> "Iterator[Weights]":
        """Opens the files until the context ends. ``stored``: how matrices are quantised."""
        with ExitStack() as stack:
            files = {}
            for file in checkpoint.files:
                try:
                    files[file] = stack.enter_context(_opened(checkpoint, file, dtype))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{file}: {error}") from error
            yield cls(checkpoint, files, dtype=dtype, device=device, stored=stored)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """A tensor of ``shape`` in the file, or the given rows or columns of it."""
        self._find(name, shape)  # A wrong shape may ask for more memory than there is.
        out_shape = list(shape)
        for axis, bounds in enumerate((rows, columns)):
            if bounds is not None:
                out_shape[axis] = bounds[1] - bounds[0]
        out = torch.empty(out_shape, dtype=self.dtype, device=self.device)
        self.read_into(out, name, shape, rows=rows, columns=columns)
        return out

    def read_matrix(
        self,
        module: str,
        shape: tuple[int, int],
        *,
        rows: Bounds | None = None,
        columns: Bounds | None = None,
    ) -> Tensor | GroupedWeight:
        """A linear layer's matrix, or the given rows and columns of it; quantised if stored so."""
        stored = self.format_of(module)
        if stored is None:
            return self.read(f"{module}.weight", shape, rows=rows, columns=columns)
        taken: dict[str, tuple[TensorInfo, Tensor]] = {}

        def take(
            suffix: str,
            dtype: str,
            *shapes: tuple[int, ...],
            rows: Bounds | None = None,
            columns: Bounds | None = None,
        ) -> Tensor:
            name = f"{module}.{suffix}"
            info = self._find(name, *shapes)
            part = self._slice(info, rows=rows, columns=columns)
            is_right = part.is_floating_point() if dtype == "float" else info.dtype == dtype
            if not is_right:
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} has type {info.dtype}; quantization_config says "
                    f"{dtype}: get a sound copy, or correct config.json"
                )
            taken[name] = info, part
            return part

        bounds = (rows or (0, shape[0]), columns or (0, shape[1]))
        try:
            matrix = unpack(stored, take, shape, *bounds, dtype=self.dtype)
        except UnpackError as error:
            info = next(iter(taken.values()))[0]
            raise CheckpointError(f"{info.file}: {module}: {error}") from error
        for name, (info, part) in taken.items():
            if part.is_floating_point() and not name.endswith(".weight"):
                _Read(info.file, name, part.float(), part.float()).check()
        if isinstance(matrix, GroupedWeight):
            return matrix.to(self.device)
        out = matrix.to(self.device, self.dtype)
        info = next(iter(taken.values()))[0]
        self._unchecked.append(_Read(info.file, f"{module}.weight", matrix, out))
        return out

    def read_fused(self, parts: list[Part], in_size: int) -> Tensor | GroupedWeight:
        """The matrices of several projections, concatenated by rows."""
        if self.stored is not None:
            return stacked(
                [self.read_matrix(name, (size, in_size), rows=rows) for name, size, rows in parts]
            )
        for name, out_size, _ in parts:
            self._find(f"{name}.weight", (out_size, in_size))
        out = torch.empty(
            sum(last - first for _, _, (first, last) in parts),
            in_size,
            dtype=self.dtype,
            device=self.device,
        )
        start = 0
        for name, out_size, (first, last) in parts:
            end = start + last - first
            self.read_into(
                out[start:end], f"{name}.weight", (out_size, in_size), rows=(first, last)
            )
            start = end
        return out

    def read_expert(
        self,
        name: str,
        shape: tuple[int, int, int],
        expert: int,
        *,
        rows: Sequence[Bounds] | None = None,
        columns: Bounds | None = None,
    ) -> Tensor:
        """The given rows, concatenated, and columns of one expert's matrix, in a checkpoint with
        one tensor for all experts: ``[E, O, I]``, or ``[E, I, O]`` if it has that shape."""
        num, num_out, num_in = shape
        inner = slice(*(columns or (0, num_in)))
        outers = [slice(*each) for each in rows or [(0, num_out)]]
        name = f"{name}.weight" if f"{name}.weight" in self.checkpoint.tensors else name
        found = self.checkpoint.tensors.get(name)
        if found is not None and found.shape == (num, num_in, num_out) != shape:
            info, parts = self._slices(
                name, found.shape, [(expert, inner, outer) for outer in outers]
            )
            parts = [part.T for part in parts]
        else:
            info, parts = self._slices(name, shape, [(expert, outer, inner) for outer in outers])
        return self._read_expert(info, name, torch.cat(parts))

    def read_turned_expert(
        self,
        name: str,
        shape: tuple[int, int, int],
        expert: int,
        *,
        rows: Bounds | None = None,
        columns: Bounds | None = None,
    ) -> Tensor:
        """The given rows and columns of one expert's matrix, in a checkpoint with one tensor
        ``[E, I, O]`` for all experts, or one in MXFP4. ``shape`` is ``[E, O, I]`` as elsewhere."""
        num, num_out, num_in = shape
        outer, (first, last) = slice(*(rows or (0, num_out))), columns or (0, num_in)
        if self.stored is None or not self.stored.has_mxfp4_experts:
            info, (part,) = self._slices(
                name, (num, num_in, num_out), [(expert, slice(first, last), outer)]
            )
            return self._read_expert(info, name, part.T.contiguous())
        group = MXFP4_GROUP
        groups = slice(first // group, math.ceil(last / group))
        stored = [("blocks", (num_in // group, group // 2)), ("scales", (num_in // group,))]
        found = [
            self._slices(
                f"{name}_{kind}", (num, num_out, *tail), [(expert, outer, groups)], dtype="U8"
            )
            for kind, tail in stored
        ]
        (info, (blocks_OGB,)), (_, (scales_OG,)) = found
        start = first - groups.start * group
        values_OI = decode_mxfp4(blocks_OGB, scales_OG)[:, start : start + last - first]
        return self._read_expert(info, f"{name}_blocks", values_OI)

    def _slices(
        self,
        name: str,
        shape: tuple[int, ...],
        slices: list[tuple[int | slice, ...]],
        *,
        dtype: str | None = None,
    ) -> tuple[TensorInfo, list[Tensor]]:
        """Parts of a tensor, which must be of type ``dtype``; None: of an unquantised type."""
        info = self._find(name, shape)
        if info.dtype not in ((dtype,) if dtype else _UNQUANTISED):
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has type {info.dtype}; it must be "
                f"{dtype or _OR_OTHERS}"
            )
        try:
            view = self._files[info.file].get_slice(info.name)
            return info, [view[each] for each in slices]
        except SafetensorError as error:
            raise CheckpointError(f"{info.file}: tensor {name!r}: {error}") from error

    def _read_expert(self, info: TensorInfo, name: str, part: Tensor) -> Tensor:
        out = part.to(self.device, self.dtype)
        self._unchecked.append(_Read(info.file, name, part, out))
        return out

    def read_fused_bias(self, parts: list[Part]) -> Tensor:
        return torch.cat(
            [self.read(f"{name}.bias", (size,), rows=rows) for name, size, rows in parts]
        )

    def read_into(
        self,
        out: Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        """Reads a tensor like `read`, but into ``out``."""
        info = self._find(name, shape)
        part = self._slice(info, rows=rows, columns=columns)
        if not part.is_floating_point():
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has type {info.dtype}; weights must be {_OR_OTHERS}"
            )
        out.copy_(part)
        read = _Read(info.file, name, part, out)
        if len(shape) == 1:
            read.check()
        else:
            self._unchecked.append(read)

    def _find(self, name: str, *shapes: tuple[int, ...]) -> TensorInfo:
        self._unread.discard(name)
        return self.checkpoint.find(name, *shapes)

    def _slice(self, info: TensorInfo, *, rows: Bounds | None, columns: Bounds | None) -> Tensor:
        """A tensor of a file, or the given rows and columns of it."""
        bounds = [slice(*rows) if rows else slice(None)] if info.shape else []
        bounds += [slice(*columns)] if columns else []
        try:
            if not bounds:
                whole: Tensor = self._files[info.file].get_tensor(info.name)
                return whole
            part: Tensor = self._files[info.file].get_slice(info.name)[tuple(bounds)]
        except SafetensorError as error:
            raise CheckpointError(f"{info.file}: tensor {info.name!r}: {error}") from error
        return part

    def check(self) -> None:
        """Checks the matrices that were read and not packed yet. Raises as `_Read.check`."""
        unchecked, self._unchecked = self._unchecked, []
        for read in unchecked:
            read.check()

    def format_of(self, module: str) -> StoredFormat | None:
        """The format of a linear layer's matrix; ``None`` if it is not quantised."""
        if self.stored is None:
            return None
        return self.stored.format_of(module, self.checkpoint.name_in_files(module))

    def raw(self, name: str) -> Tensor:
        """A whole tensor, unconverted from its file."""
        return self._slice(self._find(name), rows=None, columns=None)

    def read_plain(self, name: str) -> Tensor:
        """A whole tensor, unconverted from its file, which must not be quantised."""
        info = self.checkpoint.tensors[name]
        if info.dtype not in _UNQUANTISED and info.dtype.startswith(("F", "U8", "I8")):
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} has type {info.dtype}; weights must be "
                f"{_OR_OTHERS}, or quantized as quantization_config says"
            )
        return self.raw(name)

    def has(self, module: str) -> bool:
        """Whether the checkpoint has tensors of ``module``."""
        return any(name.startswith(f"{module}.") for name in self.checkpoint.tensors)

    def refuse_unread(self, spec: "ModelSpec", *, known: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError: a tensor was not read that would change the model's outputs.
        Tensors whose names contain one of the patterns ``known`` are allowed."""

        def is_zero(name: str) -> bool:
            return not bool(self.raw(name).any())

        patterns = re.compile("|".join(known) or "$^")
        unread = [name for name in sorted(self._unread) if not patterns.search(name)]
        refuse_unused(self.checkpoint, unread, spec, is_zero)

    def pack(
        self,
        pack: Callable[..., LinearLayer],
        weight: Tensor | GroupedWeight,
        bias: Tensor | None,
        **options: Any,
    ) -> LinearLayer:
        """The layer that ``pack`` makes of the tensors read since the last call.

        The native library checks the weights for NaN and infinity while it packs them, at almost no
        cost. Weights that it does not pack are checked here. Raises as `check`.
        """
        layer = pack(weight, bias, **options)
        if isinstance(layer, NativeLinear) and layer.is_finite:
            self._unchecked = []
        self.check()
        return layer


def _opened(checkpoint: Checkpoint, file: Path, dtype: torch.dtype) -> Any:
    if file.suffix != SUFFIX:
        return safe_open(str(file), framework="pt")
    from quire.worker.weights.gguf.weights import GgufFile  # Few need the package gguf.

    return GgufFile(file, checkpoint.tensors, dtype)


def _is_finite(x: Tensor) -> bool:
    """Whether ``x`` has no NaN and no infinity.

    A sum with either is not finite. Summing runs at the speed of memory; ``isfinite`` takes twenty
    times as long. The sum may also overflow, so if it is not finite, each value is checked.
    """
    total = x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None)
    return bool(total.isfinite()) or bool(x.isfinite().all())
