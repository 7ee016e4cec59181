"""Builds the native library's structures of a mixture of experts; see `native/experts.cpp`."""

import ctypes
from collections.abc import Sequence

import torch

from quire.kernels.native import abi as native_abi
from quire.kernels.native.check import NotNative, pointer
from quire.kernels.native.int8 import Int8Linear
from quire.kernels.native.linear import NativeLinear
from quire.kernels.ops import MixExperts
from quire.kernels.torch.experts import Expert, Router

# E experts   C hidden size


def route_op(router: Router) -> ctypes.Structure:
    """The structure of a router. It does not keep the router's tensors alive."""
    correction_E, num_experts = router.correction_E, router.num_experts
    if correction_E is not None:
        correction = pointer("corrections of scores", correction_E, torch.float32, num_experts)
    return native_abi.RouteOp(
        correction=None if correction_E is None else correction,
        num_experts=num_experts,
        top_k=router.top_k,
        groups=router.groups,
        top_groups=router.top_groups,
        is_sigmoid=router.score == "sigmoid",
        softmax_after_top_k=router.softmax_after_top_k,
        renormalise=router.renormalise,
        shared=native_abi.SHARED_EXPERTS[router.shared],
        scale=router.scale,
    )


class NativeExperts:
    """The layers of a mixture of experts, checked to fit each other.

    ``inner``: channels between the two layers; ``places``: rows per token there; ``quantized``:
    layers that take their input in int8.
    """

    def __init__(self, op: MixExperts, *, dtype: torch.dtype, num_channels: int) -> None:
        """Checks the layers.

        Raises:
            NotNative: The library does not support such layers.
            ValueError: They do not fit each other or the router.
        """
        router, shared = op.router, [] if op.shared is None else [op.shared]
        found = (len(op.experts), bool(shared))
        wanted = (router.num_experts, router.shared != "none")
        if found != wanted or not 0 < router.top_k <= router.num_experts:
            raise ValueError(
                f"experts (how many, whether one is shared): {found}; the router takes "
                f"{router.top_k} of {wanted}"
            )
        layers = [_layers(each, dtype, num_channels) for each in (*op.experts, *shared)]
        kinds = {_kind(*each) for each in layers[: len(op.experts)]}
        if len(kinds) != 1:
            raise NotNative(f"experts of unlike layers: {kinds}")
        if shared and layers[-1][0].mode != native_abi.GATED:
            raise NotNative(f"shared expert of mode {layers[-1][0].mode}")
        self._ups, self._downs = ([each[i] for each in layers] for i in range(2))
        self.quantized = [x for each in layers for x in each if isinstance(x, Int8Linear)]
        self.places = router.top_k + len(shared)
        self.inner = router.top_k * self._ups[0].num_out
        self.inner += self._ups[-1].num_out if shared else 0
        self._top_k, self._has_shared = router.top_k, bool(shared)
        self._is_split = op.is_split

    def op(self, x: int) -> ctypes.Structure:
        """The operation's structure. It has pointers to the weights and does not own them."""
        return native_abi.ExpertsOp(
            ups=_weights(self._ups),
            downs=_weights(self._downs),
            num_experts=len(self._ups) - self._has_shared,
            top_k=self._top_k,
            has_shared=self._has_shared,
            mode=self._ups[0].mode,
            x=x,
            is_split=self._is_split,
        )


def _layers(
    expert: Expert, dtype: torch.dtype, num_channels: int
) -> tuple[NativeLinear, NativeLinear]:
    up, down = expert.up, expert.down
    if not isinstance(up, NativeLinear) or not isinstance(down, NativeLinear):
        raise NotNative(f"expert of {type(up).__name__} and {type(down).__name__}")
    found = [
        (each.dtype, each.weights.num_in, each.num_out, bool(each.weights.gated))
        for each in (up, down)
    ]
    wanted = [(dtype, num_channels, up.num_out, True), (dtype, up.num_out, num_channels, False)]
    if found != wanted:
        raise ValueError(f"expert of (type, inputs, outputs, gated) {found}: must be {wanted}")
    return up, down


def _kind(up: NativeLinear, down: NativeLinear) -> tuple[int, ...]:
    """Properties that all experts must share for their rows to be stored together."""
    is_int8 = (_is_int8(up), _is_int8(down))
    return (up.num_out, up.mode, *is_int8, up.weights.splits, down.weights.splits)


def _is_int8(layer: NativeLinear) -> bool:
    return isinstance(layer, Int8Linear)


def _weights(layers: Sequence[NativeLinear]) -> "ctypes.Array[ctypes.Structure]":
    return (native_abi.LinearWeights * len(layers))(*(layer.weights for layer in layers))
