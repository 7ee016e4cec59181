"""Mixtures of experts (Shazeer et al. 2017) in which a token's bits do not depend on other tokens.

Tokens are sorted by expert, stably, and each expert multiplies its rows in one product. A packed
layer's row has the same bits in any batch. A token's results are summed in the order in which its
router ranks the experts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.kernels.native.linear import NativeLinear
from quire.kernels.ops import LinearLayer, MixExperts, SharedExpert
from quire.kernels.torch.linear import unrounded
from quire.kernels.torch.low_rank import StepAdapters, multiply

# T tokens   C hidden size   E experts   k experts of a token   S the same and the shared one
# X the experts, and the gate of the shared one where it has one   N rows of one expert

_LEAST_SUM = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """Chooses the experts of each token and their weights, in float32. Among equal scores the
    expert with the lower number comes first."""

    layer: LinearLayer
    """From `pack_router`: a score per expert, then the shared expert's gate if it has one."""
    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_top_k: bool = False
    correction_E: Tensor | None = None
    """Added to the scores when experts are chosen, but not to their weights."""
    groups: int = 1
    top_groups: int = 1
    """Experts are chosen from this many of the ``groups``: those with the greatest sums of their
    two best scores."""
    renormalise: bool = False
    """Whether weights are normalised to add up to ``scale``."""
    scale: float = 1.0
    shared: SharedExpert = "none"

    @property
    def num_scores(self) -> int:
        return self.num_experts + (self.shared == "gated")

    def scores(self, x_TC: Tensor) -> Tensor:
        """The router's scores, ``[T, X]`` float32."""
        layer = self.layer
        return layer.unrounded(x_TC) if isinstance(layer, NativeLinear) else layer(x_TC.float())

    def choose(self, score_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses by `scores`. Returns experts ``[T, k]``, the best first, and weights ``[T, S]``,
        the shared expert's last."""
        score_TE = score_TX[:, : self.num_experts]
        if self.score == "sigmoid":
            score_TE = 1 / (1 + torch.exp(-score_TE))
        elif not self.softmax_after_top_k:
            score_TE = score_TE.softmax(-1)
        choice_TE = score_TE if self.correction_E is None else score_TE + self.correction_E
        if self.groups > 1:
            choice_TE = self._of_the_best_groups(choice_TE)
        experts_Tk = _best(choice_TE, self.top_k)
        weights_Tk = score_TE.gather(1, experts_Tk)
        if self.softmax_after_top_k:
            weights_Tk = weights_Tk.softmax(-1)
        if self.renormalise:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _LEAST_SUM)
        weights_Tk = weights_Tk * self.scale
        if self.shared == "none":
            return experts_Tk, weights_Tk
        weight_T1 = torch.ones_like(weights_Tk[:, :1])
        if self.shared == "gated":
            weight_T1 = 1 / (1 + torch.exp(-score_TX[:, self.num_experts :]))
        return experts_Tk, torch.cat([weights_Tk, weight_T1], dim=1)

    def _of_the_best_groups(self, choice_TE: Tensor) -> Tensor:
        """``choice``, with minus infinity outside of the best groups."""
        choice_TGX = choice_TE.view(len(choice_TE), self.groups, -1)
        best_TG = choice_TGX.topk(2, dim=-1).values.sum(-1)
        groups_Tg = _best(best_TG, self.top_groups)
        is_taken_TG = torch.zeros_like(best_TG, dtype=torch.bool).scatter_(1, groups_Tg, True)
        return choice_TGX.masked_fill(~is_taken_TG[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expert:
    """An MLP of two layers; ``up`` includes the activation."""

    up: LinearLayer
    down: LinearLayer

    def __call__(self, x_TC: Tensor) -> Tensor:
        """The output in float32, unrounded if the layer supports it."""
        return unrounded(self.down, self.up(x_TC)).float()


def mix_experts(
    op: MixExperts,
    x_TC: Tensor,
    *,
    choose: Callable[[Router, Tensor], tuple[Tensor, Tensor]],
    multiply_experts: Callable[[MixExperts, Tensor, Tensor], Tensor],
    all_reduce: Callable[[Tensor], Tensor],
    adapters: StepAdapters | None = None,
) -> Tensor:
    """Computes the operation. ``choose`` and ``multiply_experts`` are a backend's `choose_experts`
    and `multiply_experts`."""
    experts_Tk, weights_TS = choose(op.router, op.router.scores(x_TC))
    (num_tokens, top_k), num_channels = experts_Tk.shape, x_TC.shape[1]
    out_TkC = multiply_experts(op, x_TC, experts_Tk)
    out_STC = out_TkC.view(num_tokens, top_k, -1).transpose(0, 1)
    ax_TR: Tensor | None = None
    last = f"{op.name}.shared.down"
    if op.shared is not None:
        hidden = multiply(op.shared.up, f"{op.name}.shared.gate_up", x_TC, adapters)
        out_TC = unrounded(op.shared.down, hidden).float()
        ax_TR = None if adapters is None else adapters.shrink(last, hidden)
        if adapters is not None and ax_TR is not None and not op.is_split:
            out_TC = adapters.expand(last, out_TC, ax_TR)
        out_STC = torch.cat([out_STC, out_TC[None]])
    if op.is_split and adapters is not None and ax_TR is not None:
        summed = all_reduce(torch.cat([out_STC.flatten(), ax_TR.flatten()]))
        out_STC = summed[: out_STC.numel()].view(out_STC.shape)
        ax_TR = summed[out_STC.numel() :].view(ax_TR.shape)
        out_TC = adapters.expand(last, out_STC[-1], ax_TR)
        out_STC = torch.cat([out_STC[:-1], out_TC[None]])
    elif op.is_split:
        out_STC = all_reduce(out_STC.reshape(-1, num_channels)).view(out_STC.shape)
    total_TC = torch.zeros_like(x_TC, dtype=torch.float32)
    for place, out_TC in enumerate(out_STC):
        if op.bias_EC is not None and place < top_k:
            out_TC = out_TC + op.bias_EC[experts_Tk[:, place]]
        total_TC += out_TC * weights_TS[:, place, None]
    return total_TC.to(x_TC.dtype)


def multiply_one_by_one(op: MixExperts, x_TC: Tensor, experts_Tk: Tensor) -> Tensor:
    """The outputs of each token's experts, ``[T * k, C]`` float32, one expert at a time."""
    num_tokens, top_k = experts_Tk.shape
    out_TkC = x_TC.new_empty(num_tokens * top_k, x_TC.shape[1], dtype=torch.float32)
    for expert, rows_N in rows_by_expert(experts_Tk, len(op.experts)):
        out_TkC[rows_N] = op.experts[expert](x_TC[rows_N // top_k])
    return out_TkC


def _best(score_TE: Tensor, num: int) -> Tensor:
    """The indices of the ``num`` greatest scores, in order; among equal ones the first."""
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :num]


def rows_by_expert(experts_Tk: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert with at least one row, and its row indices in ``[T * k]``, ascending.

    Numbers of ``num_experts`` and above belong to no expert.
    """
    flat = experts_Tk.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)[:num_experts].tolist()
    for expert, rows_N in enumerate(torch.split(order[: sum(counts)], counts)):
        if len(rows_N):
            yield expert, rows_N
