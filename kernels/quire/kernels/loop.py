"""Runs a program one operation at a time with a backend's kernels. This defines the operations."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import Batch, GreedyEdits, WantedColumns
from quire.kernels.ops import (
    Activate,
    Add,
    AddNorm,
    AllReduce,
    Attend,
    Embed,
    GatedLinear,
    Gather,
    KvCache,
    Linear,
    Logits,
    MixExperts,
    Norm,
    Program,
    RotaryTable,
    RotateAndWrite,
    Value,
)
from quire.kernels.reference import layers as reference
from quire.kernels.torch.experts import mix_experts
from quire.kernels.torch.linear import unrounded
from quire.kernels.torch.low_rank import StepAdapters, multiply

# S rows that are sampled   V vocabulary
# A heads of Q, K and V together   D head size   R half of the rotated channels   T tokens


class Loop:
    """A `quire.kernels.ops.ProgramRunner`. It rounds where Hugging Face's models do."""

    chooses = False

    def __init__(self, backend: AttentionBackend, program: Program) -> None:
        self._backend = backend
        self.adapters = backend.low_rank_layers(program)
        self._program = program
        pairs = itertools.pairwise(program)
        self._shares = {
            id(op)
            for op, after in pairs
            if isinstance(op, Linear) and isinstance(after, AllReduce) and op.out == after.x
        }
        """Ids of operations whose products are partial sums, to be summed over the ranks."""

    def forward(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        all_reduce: Callable[[Tensor], Tensor],
        greatest_G2: Tensor | None = None,
        edits: GreedyEdits | None = None,
        wanted: WantedColumns | None = None,
    ) -> Tensor:
        assert greatest_G2 is None, "`chooses` says so"
        assert wanted is None, "`chooses` says so"
        backend, turns = self._backend, _Turns(batch.positions_T)
        adapters = StepAdapters.of(self.adapters, batch.adapter_slots_T)
        values: dict[Value, Tensor] = {}
        ax_TR: Tensor | None = None  # adapters' A x of the last partial sum
        for op in self._program:
            match op:
                case Embed():
                    values[op.out] = functional.embedding(batch.token_ids_T, op.weight_VC)
                case Norm():
                    values[op.out] = self._norm(op, values[op.x])
                case Linear() if id(op) in self._shares:
                    values[op.out] = unrounded(op.layer, values[op.x])
                    if adapters is not None:
                        ax_TR = adapters.shrink(op.name, values[op.x])
                    share = (op.name, values[op.out].shape[1])
                    if ax_TR is not None:
                        parts = (values[op.out], ax_TR.to(values[op.out].dtype))
                        values[op.out] = torch.cat(parts, dim=1)
                case Linear() | GatedLinear():
                    product = multiply(op.layer, op.name, values[op.x], adapters)
                    adds = isinstance(op, Linear) and op.adds
                    values[op.out] = values[op.out] + product if adds else product
                case Activate():
                    values[op.x] = reference.gelu(values[op.x])
                case RotateAndWrite():
                    values[op.out] = backend.rotate_and_write_kv(
                        self._heads(op, values[op.x]),
                        *turns.at(op.table),
                        *kv[op.kv],
                        batch.slot_mapping_T,
                        options=op.options,
                    )
                    if op.q_scale_P is not None:
                        scale_T = op.q_scale_P.index_select(0, batch.positions_T)
                        values[op.out] = values[op.out] * scale_T[:, None, None]
                case Attend():
                    attended_THD = backend.attend(
                        values[op.x], *kv[op.kv], batch, scale=op.scale, options=op.options
                    )
                    values[op.out] = attended_THD.flatten(1)
                case MixExperts():
                    values[op.out] = mix_experts(
                        op,
                        values[op.x],
                        choose=backend.choose_experts,
                        multiply_experts=backend.multiply_experts,
                        all_reduce=all_reduce,
                        adapters=adapters,
                    )
                case AllReduce():
                    summed = all_reduce(values[op.x])
                    if adapters is not None and ax_TR is not None:
                        name, width = share
                        summed = adapters.expand(name, summed[:, :width], summed[:, width:])
                        ax_TR = None
                    summed = summed if op.bias_C is None else summed + op.bias_C
                    values[op.x] = summed.to(values["residual"].dtype)
                case Add():
                    branch = values[op.x] if op.scale == 1.0 else values[op.x] * op.scale
                    values[op.to] = values[op.to] + branch
                case AddNorm():
                    values[op.out], values[op.to] = backend.rms_norm(
                        values[op.x], op.weight_C, eps=op.eps, residual_TC=values[op.to]
                    )
                case Gather():
                    values[op.x] = values[op.x].index_select(0, batch.last_tokens_S)
                case Logits():
                    if batch.hidden is not None:
                        batch.hidden.take(values[op.x])
                    logits_SV = op.layer(values[op.x])
                    if op.scale != 1.0:
                        logits_SV = logits_SV * op.scale
                    if op.cap is not None:
                        logits_SV = torch.tanh(logits_SV / op.cap) * op.cap
                    return logits_SV.float() if logits_SV.device.type == "cpu" else logits_SV
        raise AssertionError("a program ends with its logits")

    def _heads(self, op: RotateAndWrite, x: Tensor) -> Tensor:
        """Q, K and V, ``[T, A, D]``, with the operation's norms of Q and K applied, if any."""
        qkv_TAD = x.view(-1, op.num_heads + 2 * op.num_kv_heads, op.head_size)
        if op.q_norm_D is None or op.k_norm_D is None:
            return qkv_TAD
        sizes = [op.num_heads, op.num_kv_heads, op.num_kv_heads]
        q_THD, k_TKD, v_TKD = torch.split(qkv_TAD, sizes, dim=1)
        normed = []
        for x_TND, weight_C in ((q_THD, op.q_norm_D), (k_TKD, op.k_norm_D)):
            norm = Norm(weight_C=weight_C, eps=op.eps, kind=op.kind, x="qkv", out="qkv")
            normed.append(self._norm(norm, x_TND.reshape(-1, len(weight_C))).view(x_TND.shape))
        return torch.cat([*normed, v_TKD], dim=1)

    def _norm(self, op: Norm, x_TC: Tensor) -> Tensor:
        if op.kind == "rms":
            return self._backend.rms_norm(x_TC, op.weight_C, eps=op.eps)[0]
        return self._backend.wide_norm(
            x_TC, op.weight_C, op.bias_C, eps=op.eps, is_centred=op.kind == "layer"
        )


class _Turns:
    """The rows of each rotary table for the step's positions, gathered once for all layers."""

    def __init__(self, positions_T: Tensor) -> None:
        self._positions_T = positions_T
        self._found: dict[RotaryTable, tuple[Tensor, Tensor]] = {}

    def at(self, table: RotaryTable) -> tuple[Tensor, Tensor]:
        if table not in self._found:
            self._found[table] = (
                table.cos_PR.index_select(0, self._positions_T),
                table.sin_PR.index_select(0, self._positions_T),
            )
        return self._found[table]
