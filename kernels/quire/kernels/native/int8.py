"""The native library's linear layers with int8 weights and inputs (`native/gemm_int8.cpp`).

Results are bit-identical to those of `quire.kernels.reference.layers.int8_linear`.
"""

from ctypes import byref

import torch
from torch import Tensor

from quire.kernels.native import abi as native_abi
from quire.kernels.native.linear import NativeLinear

# T tokens   I, O a layer's input and output   P parts of the input

_GROUP = 4
"""Inputs per 32-bit lane."""
_MAX_PART = 130_000
"""The most products of int8 whose sum fits 32 bits."""


class Int8Linear(NativeLinear):
    """A layer that quantises its weights itself; each part has its own scales."""

    is_int8 = True

    @staticmethod
    def can_pack(weight_OI: Tensor, *, num_parts: int = 1) -> bool:
        """Whether weights are float32 or bfloat16, with parts short enough for 32-bit sums."""
        return weight_OI.dtype in native_abi.DTYPES and weight_OI.shape[1] <= num_parts * _MAX_PART

    @property
    def input_bytes(self) -> int:
        """Bytes of a quantised row of inputs."""
        part = self.weights.num_in // self.weights.splits
        return int(-(-part // _GROUP) * _GROUP * self.weights.splits)

    def run(self, x_TI: Tensor, out_TO: Tensor, mode: int) -> None:
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        values = torch.empty(len(x_TI), self.input_bytes, dtype=torch.uint8)
        scales_TP = torch.empty(len(x_TI), self.weights.splits)
        quantize = native_abi.QuantizeArgs(
            dtype=native_abi.DTYPES[self.dtype],
            splits=self.weights.splits,
            x=x_TI.data_ptr(),
            x_stride=x_TI.stride(0),
            num_in=self.weights.num_in,
            num_rows=len(x_TI),
            out=values.data_ptr(),
            out_stride=values.stride(0),
            scales=scales_TP.data_ptr(),
        )
        self._library.quire_quantize(byref(quantize), torch.get_num_threads())
        self._multiply(values, out_TO, mode, scales_TP)
