"""What a model asks of the machine it runs on, and which implementation a device gets.

`AttentionBackend` is a namespace of pure functions of tensors. The plain-PyTorch meaning of each
is the function of the same name in `quire.kernels.reference` (`attend` is `paged_attention`), or
in `quire.kernels.linear`.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Rows
from quire.kernels.experts import Router
from quire.kernels.grouped import GroupedWeight
from quire.kernels.low_rank import LowRankLayers
from quire.kernels.ops import GateActivation, LinearLayer, MixExperts, Program, ProgramRunner
from quire.kernels.quantization import Quantization

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   A heads of Q, K and V together   D head size   R half of the rotated size
# C channels
# I, O a linear layer's input and output   X as in `quire.kernels.experts`


class AttentionBackend(Protocol):
    """The kernels of one kind of device."""

    @property
    def name(self) -> str:
        """ "cpu", "cpu-native" or "triton"."""

    def is_head_major(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether a block of the cache has one KV head's tokens after the other's; else it has one
        token's heads after the other's. For queries of ``dtype``, whatever the cache's is."""

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
        """Stores the step's K and V in their slots, ``block * block_size + offset``, int64."""

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

        A row's bits do not depend on who shares the batch, nor on how its prompt is cut into
        chunks. On a GPU decodes and chunks sum in different orders; with ``num_decodes=0`` every
        row, decodes too, takes the order of the chunks. A decode of length 0 gets zeros: such rows
        fill a batch up.
        """

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual`` and the sum itself, the next layer's residual."""

    def wide_norm(
        self,
        x_TC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor | None,
        *,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        """A norm in float32, rounded at its end; weight and bias are float32."""

    def pack_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        num_parts: int = 1,
        is_lm_head: bool = False,
    ) -> LinearLayer:
        """A linear layer, laid out as this backend likes it; the caller may drop the tensors.

        ``num_parts``, a power of two: parts of the input that are summed alone, and then as a
        binary tree, where the backend can. Ranks that hold whole branches of that tree get the
        bits that one rank would.
        """

    def pack_gated_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        activation: GateActivation = "silu",
    ) -> LinearLayer:
        """`quire.kernels.ops.GatedLinear`'s layer, whose outputs are the gates, then the ups."""

    def pack_router(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearLayer:
        """`Router.layer`: its product is in float32, whatever the backend quantises."""

    def choose_experts(self, router: Router, score_TX: Tensor) -> tuple[Tensor, Tensor]:
        """`Router.choose`."""

    def multiply_experts(self, op: MixExperts, x_TC: Tensor, experts_Tk: Tensor) -> Tensor:
        """What its experts make of each token, ``[T * k, C]``, float32; of a program that this
        backend prepared."""

    def low_rank_layers(self, program: Program) -> LowRankLayers:
        """Adapters for a program over such layers that runs operation by operation."""

    def prepare(self, program: Program) -> ProgramRunner:
        """A program over layers that this backend packed, in the fastest way that it has."""


def backend_for(
    device: torch.device,
    *,
    quantization: Quantization | None = None,
    options: Collection[AttentionOptions] = (PLAIN,),
) -> AttentionBackend:
    """The kernels for a device, and for all that the model's layers ask of attention.

    Where there are several GPUs, the device must be the current one.

    ``quantization`` is what its linear layers make of the weights they are given.

    Raises:
        ValueError: There are none for this kind of device, or none that quantise so.
        ImportError: The device is a GPU and Triton is not installed.
    """
    if device.type == "cpu":
        from quire.kernels.cpu import CpuBackend
        from quire.kernels.native import library
        from quire.kernels.native_backend import NativeBackend

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
        from quire.kernels.triton_backend import TritonBackend

        return TritonBackend()
    raise ValueError(f"device {str(device)!r}: kernels exist for 'cpu' and 'cuda'")
