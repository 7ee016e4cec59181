"""Linear layers over packed weights, and the memory for these.

Packed weights are stored consecutively in large chunks of memory with huge pages. A decode step
mostly reads weights, and a page table walk for every 4 KiB would cost a tenth of its time.
"""

import ctypes
from abc import ABC, abstractmethod
from ctypes import byref
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.kernels.grouped import LINE, GroupedWeight
from quire.kernels.native import abi as native_abi
from quire.kernels.native.check import pointer
from quire.kernels.ops import Clamped, GateActivation

# T tokens   I, O a layer's input and output   G twice the gated output

_CHUNK_BYTES = 256 << 20
"""Size of an allocation. Memory that is never touched costs nothing."""
_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 4096


def empty_huge(library: ctypes.CDLL, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, aligned to huge pages and backed by them if available."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -raw.data_ptr() % _HUGE_PAGE_BYTES
    library.quire_huge_pages(raw.data_ptr(), raw.numel())
    return raw[start : start + num_bytes].view(dtype).view(shape)


class Arena:
    """An allocator of weights, whose chunks live as long as any slice of them is used."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if rounded > len(self._free):
            self._free = empty_huge(self._library, (max(rounded, _CHUNK_BYTES),), torch.uint8)
        taken, self._free = self._free[:num_bytes], self._free[rounded:]
        return taken


class NativeLinear(ABC):
    """A `quire.kernels.ops.LinearLayer` of the native library, with its packed weights.

    ``num_parts``: the parts of the input that are summed separately and then added as a binary
    tree. The sum of two ranks with half of the input and of the parts each has the bits of one
    rank.
    """

    is_int8: ClassVar[bool] = False

    def __init__(
        self,
        library: ctypes.CDLL,
        arena: Arena,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None,
        *,
        num_parts: int = 1,
        gated: bool = False,
        activation: GateActivation = "silu",
    ) -> None:
        """Packs copies of ``weight`` and ``bias``; see `can_pack`."""
        if not self.can_pack(weight_OI, num_parts=num_parts):
            raise ValueError(f"weight: {weight_OI.dtype} {weight_OI.shape}, {num_parts=}")
        _check_weights(weight_OI, bias_O, num_parts=num_parts, gated=gated)
        num_out, num_in = weight_OI.shape
        panel = library.quire_panel_columns()
        columns, each = (num_out // 2, panel // 2) if gated else (num_out, panel)
        num_columns = -(-columns // each) * panel
        self.mode = native_abi.gate_mode(activation) if gated else native_abi.STORE
        """How the product is stored."""
        self._library = library
        self._bias = None if bias_O is None else torch.empty(num_columns)
        self.dtype = weight_OI.dtype
        self.activation = activation
        """The activation, used by gated layers only."""
        self.shape = (num_out, num_in)
        self.num_out = columns
        self.weights = native_abi.LinearWeights(
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_in=num_in,
            num_out=num_out,
            splits=num_parts,
            gated=gated,
            is_int8=self.is_int8,
        )
        if isinstance(activation, Clamped):
            self.weights.alpha, self.weights.limit = activation.alpha, activation.limit
        scale_OG = zero_OG = None
        source_OI = weight_OI
        if isinstance(weight_OI, GroupedWeight):
            weight_OI = weight_OI.regrouped(num_in // num_parts)
            source_OI, scale_OG, zero_OG = weight_OI.stored()
            self.weights.group = weight_OI.group
            self.weights.wide_scales = not torch.equal(scale_OG, scale_OG.bfloat16().float())
            self.weights.has_zeros = zero_OG is not None
            num_bytes, pack = library.quire_w4_bytes(byref(self.weights)), library.quire_pack_w4
        elif self.is_int8:
            num_bytes, pack = library.quire_int8_bytes(byref(self.weights)), library.quire_pack_int8
        else:
            num_bytes, pack = num_columns * num_in * self.dtype.itemsize, library.quire_pack
        assert isinstance(source_OI, Tensor)
        self._weight = arena.take(num_bytes)
        self.weights.weight = self._weight.data_ptr()
        source_OI = source_OI if source_OI.stride(1) == 1 else source_OI.contiguous()
        bias_O = None if bias_O is None else bias_O.contiguous()
        is_broken = ctypes.c_int32(0)
        arguments = native_abi.PackArgs(
            dtype=native_abi.DTYPES[self.dtype],
            source=source_OI.data_ptr(),
            stride=source_OI.stride(0),
            source_bias=None if bias_O is None else bias_O.data_ptr(),
            weights=self.weights,
            is_broken=ctypes.addressof(is_broken),
            scales=None if scale_OG is None else scale_OG.data_ptr(),
            zeros=None if zero_OG is None else zero_OG.data_ptr(),
        )
        pack(byref(arguments), torch.get_num_threads())
        self.is_finite = not is_broken.value and (
            scale_OG is None or bool(scale_OG.isfinite().all())
        )
        """Whether none of the weights is NaN or infinite."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        num_in = self.weights.num_in
        if x_TI.dtype != self.dtype or x_TI.dim() != 2 or x_TI.shape[1] != num_in:
            raise ValueError(
                f"input: {x_TI.dtype} {tuple(x_TI.shape)}; must be {self.dtype} of {num_in} columns"
            )
        out_TO = torch.empty(len(x_TI), self.num_out, dtype=self.dtype)
        self.run(x_TI, out_TO, self.mode)
        return out_TO

    def unrounded(self, x_TI: Tensor) -> Tensor:
        """The product in float32, unrounded: a rank's partial sum. A gated layer's product is
        gates, then ups."""
        num_out = self.shape[0]
        if not self.weights.gated:
            out_TO = torch.empty(len(x_TI), num_out, dtype=torch.float32)
            self.run(x_TI, out_TO, native_abi.STORE_F32)
            return out_TO
        # All columns of the panels; each panel is a vector of gates, then that of their ups.
        panel = self._library.quire_panel_columns()
        num_panels = -(-self.num_out // (panel // 2))
        out_TP = torch.empty(len(x_TI), num_panels * panel, dtype=torch.float32)
        gated = self.weights
        self.weights = native_abi.LinearWeights.from_buffer_copy(gated)
        self.weights.gated, self.weights.num_out = 0, out_TP.shape[1]
        try:
            self.run(x_TI, out_TP, native_abi.STORE_F32)
        finally:
            self.weights = gated
        halves = out_TP.view(len(x_TI), num_panels, 2, -1).transpose(1, 2).flatten(2)
        return halves[:, :, : self.num_out].reshape(len(x_TI), num_out)

    @staticmethod
    @abstractmethod
    def can_pack(weight_OI: Any, *, num_parts: int = 1) -> bool:
        """Whether this kind of layer supports these weights."""

    @abstractmethod
    def run(self, x_TI: Tensor, out_TO: Tensor, mode: int) -> None:
        """Computes the layer and stores the result in ``out_TO`` by ``mode``."""

    def _multiply(self, x: Tensor, out_TO: Tensor, mode: int, scales: Tensor | None = None) -> None:
        """Multiplies the rows ``x``; int8 rows have ``scales``."""
        arguments = native_abi.LinearArgs(
            dtype=native_abi.DTYPES[self.dtype],
            mode=mode,
            weights=ctypes.pointer(self.weights),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            out=out_TO.data_ptr(),
            out_stride=out_TO.stride(0),
            num_rows=len(x),
            x_scales=None if scales is None else scales.data_ptr(),
        )
        self._library.quire_linear(byref(arguments), torch.get_num_threads())


def _check_weights(
    weight_OI: Tensor | GroupedWeight, bias_O: Tensor | None, *, num_parts: int, gated: bool
) -> None:
    num_out = weight_OI.shape[0]
    values = weight_OI.code_OI if isinstance(weight_OI, GroupedWeight) else weight_OI
    if values.dim() != 2 or not values.is_cpu:
        raise ValueError(f"weight: {tuple(values.shape)} on {values.device}")
    if num_parts not in (1, 2, 4, 8):
        raise ValueError(f"{num_parts=}: must be 1, 2, 4 or 8")
    if gated and num_out % 2:
        raise ValueError(f"weight of {num_out} rows: a gated layer has as many gates as ups")
    if bias_O is not None:
        pointer("bias", bias_O.contiguous(), weight_OI.dtype, num_out)


class PackedLinear(NativeLinear):
    """A layer in the input's type: see `native/gemm.cpp`, for 4-bit weights `gemm_w4.cpp`."""

    @staticmethod
    def can_pack(weight_OI: Tensor | GroupedWeight, *, num_parts: int = 1) -> bool:
        """Whether weights are float32 or bfloat16 with an even number of inputs per part, or of 4
        bits with a multiple of `LINE` inputs per part."""
        unit = LINE if isinstance(weight_OI, GroupedWeight) else 2
        return weight_OI.dtype in native_abi.DTYPES and weight_OI.shape[1] % (unit * num_parts) == 0

    def run(self, x_TI: Tensor, out_TO: Tensor, mode: int) -> None:
        x_TI = x_TI if x_TI.stride(1) == 1 and x_TI.stride(0) % 2 == 0 else x_TI.contiguous()
        self._multiply(x_TI, out_TO, mode)
