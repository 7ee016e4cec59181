"""The interface of a kernel backend, and the choice of a backend for a device.

`AttentionBackend` is a namespace of pure functions of tensors. The plain-PyTorch definition of each
is the function of the same name in `quire.kernels.reference.layers` or
`quire.kernels.torch.linear`; those of the functions of the KV cache are in
`quire.kernels.reference.paged` (`attend` is `paged_attention`).
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Rows
from quire.kernels.grouped import GroupedWeight
from quire.kernels.ops import GateActivation, LinearLayer, MixExperts, Program, ProgramRunner
from quire.kernels.quantization import Quantization
from quire.kernels.torch.experts import Router
from quire.kernels.torch.low_rank import LowRankLayers

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   A heads of Q, K and V together   D head size   R half of the rotated size
# C channels
# I, O a linear layer's input and output   X as in `quire.kernels.torch.experts`


class AttentionBackend(Protocol):
    """The kernels of one kind of device."""

    @property
    def name(self) -> str:
        """The backend's name: "cpu", "cpu-native" or "triton"."""

    def is_head_major(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether a block of the cache is laid out as ``[heads, tokens]`` rather than
        ``[tokens, heads]``, for queries of ``dtype``, whatever the type of the cache."""

    def write_kv(
        self,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
        *,
        options: AttentionOptions = PLAIN,
    ) -> None:
        """Stores the step's K and V in their slots (int64, ``block * block_size + offset``)."""

    def rotate_and_write_kv(
        self,
        qkv_TAD: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
        *,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """`reference.rotary_embedding` of Q and K, then `write_kv` of K and V; returns Q,
        ``[T, H, D]``. ``cos`` and ``sin`` are float32."""

    def attend(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        rows: Rows,
        *,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Causal attention of the step's tokens over the paged cache; ``[T, H, D]`` like q.

        A row's bits do not depend on the other rows of the batch, nor on how its prompt is chunked.
        On a GPU, decodes and chunks sum in different orders; with ``num_decodes=0`` all rows,
        decodes included, use the order of chunks. A decode of length 0, which pads a batch, gets
        zeros.
        """

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the RMS norm of ``x + residual``, and the sum, the next layer's residual."""

    def wide_norm(
        self,
        x_TC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor | None,
        *,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        """A norm computed in float32 and rounded at the end; weight and bias are float32."""

    def pack_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        num_parts: int = 1,
        is_lm_head: bool = False,
    ) -> LinearLayer:
        """Packs a linear layer into this backend's layout; the caller may free the tensors.

        ``num_parts``, a power of two: the parts of the input that are summed separately and then
        added as a binary tree, if the backend supports it. Ranks that hold whole branches of that
        tree get the same bits as a single rank.
        """

    def pack_gated_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        activation: GateActivation = "silu",
    ) -> LinearLayer:
        """Packs the layer of a `quire.kernels.ops.GatedLinear`; the rows are gates, then ups."""

    def pack_router(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearLayer:
        """Packs `Router.layer`, whose product is float32 even if the backend quantises."""

    def choose_experts(self, router: Router, score_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts as `Router.choose` does."""

    def multiply_experts(self, op: MixExperts, x_TC: Tensor, experts_Tk: Tensor) -> Tensor:
        """The outputs of each token's experts, ``[T * k, C]`` float32. ``op`` is of a program that
        this backend prepared."""

    def low_rank_layers(self, program: Program) -> LowRankLayers:
        """Adapters for a program over this backend's layers that runs one operation at a time."""

    def prepare(self, program: Program) -> ProgramRunner:
        """The fastest runner of a program over layers that this backend packed."""


def backend_for(
    device: torch.device,
    *,
    quantization: Quantization | None = None,
    options: Collection[AttentionOptions] = (PLAIN,),
) -> AttentionBackend:
    """The backend for a device that supports all attention ``options`` of the model's layers.

    If there are several GPUs, the device must be the current one.

    ``quantization`` is the format to which linear layers quantise their weights.

    Raises:
        ValueError: No backend supports this kind of device or this quantization.
        ImportError: The device is a GPU and Triton is not installed.
    """
    if device.type == "cpu":
        from quire.kernels.native.backend import NativeBackend
        from quire.kernels.native.library import library
        from quire.kernels.torch.cpu import CpuBackend

        native = library()
        if native is None:
            return CpuBackend(quantization=quantization)
        return NativeBackend(native, quantization=quantization)
    if quantization is not None:
        raise ValueError(f"quantization={quantization!r}: kernels exist for 'cpu' only")
    if any(each.sinks is not None for each in options):
        raise ValueError("attention sinks: kernels exist for 'cpu' only")
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"device {device} needs Triton, which comes with the CUDA build of torch; "
                "install that, or run `pip install 'triton>=3.6'`"
            ) from error
        from quire.kernels.triton.backend import TritonBackend

        return TritonBackend()
    raise ValueError(f"device {str(device)!r}: kernels exist for 'cpu' and 'cuda'")
