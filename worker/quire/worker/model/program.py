"""Compiles a model's description into the operations of one rank, and reads their weights.

Matrices are split as in Megatron-LM (Shoeybi et al. 2019): Q, K, V, gate and up by their output, o
and down by their input, the LM head by the vocabulary. Every rank holds the whole embedding: this
costs ``vocab_size * hidden_size`` values and saves an all-reduce in every step. A tied LM head is a
view of the embedding.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import AttentionBackend
from quire.kernels.grouped import GroupedWeight
from quire.kernels.ops import (
    Activate,
    Add,
    AllReduce,
    Attend,
    Clamped,
    Embed,
    GatedLinear,
    Gather,
    Linear,
    LinearLayer,
    Logits,
    MixExperts,
    Norm,
    Op,
    Program,
    RotaryTable,
    RotateAndWrite,
    SharedExpert,
    Value,
)
from quire.kernels.torch.experts import Expert, Router
from quire.worker.model import spec as described
from quire.worker.model.rope import channel_order, query_scale, rotary_table
from quire.worker.model.spec import Attention, Experts, ModelSpec, Rope
from quire.worker.model.support import check_runnable
from quire.worker.weights.loader import Part, Shard, Weights


def make_program(
    spec: ModelSpec,
    weights: Weights,
    *,
    shard: Shard,
    backend: AttentionBackend,
    max_model_len: int,
) -> Program:
    """The operations of the rank ``shard``, with their weights.

    ``backend`` packs each matrix as soon as it is read, so at most one matrix is in memory twice.

    Raises:
        CheckpointError: No backend runs such a model, or as `Weights` says.
    """
    check_runnable(spec)
    maker = _Maker(spec, weights, shard=shard, backend=backend, max_model_len=max_model_len)
    return tuple(maker.ops())


def attention_options(attention: Attention, max_model_len: int) -> AttentionOptions:
    """A layer's options for the attention kernel. A window of ``max_model_len`` or more is dropped.
    The sinks are placeholders: zeros, one per head."""
    window = attention.window
    return AttentionOptions(
        window=window if window and window < max_model_len else None,
        lookahead=attention.lookahead,
        soft_cap=attention.score_cap,
        sinks=(0.0,) * attention.num_heads if attention.sinks else None,
    )


class _Maker:
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        shard: Shard,
        backend: AttentionBackend,
        max_model_len: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._shard = shard
        self._backend = backend
        self._max_model_len = max_model_len
        self._tables: dict[int | None, RotaryTable] = {}

    def ops(self) -> Iterator[Op]:
        spec, weights, names = self._spec, self._weights, self._spec.names
        shape = (spec.vocab_size, spec.hidden_size)
        has_head = weights.has(names.lm_head)
        # As in transformers, the tensor that exists serves as both.
        is_turned = spec.tied and has_head and not weights.has(names.embedding)
        name = names.lm_head if is_turned else names.embedding
        embedding_VC = weights.read(f"{name}.weight", shape)
        weights.check()
        scaled_VC = embedding_VC
        if spec.embedding_scale != 1.0:
            scaled_VC = embedding_VC * embedding_VC.new_tensor(spec.embedding_scale)
        yield Embed(weight_VC=scaled_VC, out="residual")
        for number in range(len(spec.layers)):
            yield from self._attention(number)
            yield from self._mlp(number)
        vocab = self._shard.range_of(spec.vocab_size)
        lm_head_VC: Tensor | GroupedWeight = embedding_VC[slice(*vocab)]
        if has_head or not spec.tied:
            own_VC = weights.read_matrix(names.lm_head, shape, rows=vocab)
            if not (spec.tied and _is_same(own_VC, lm_head_VC)):
                lm_head_VC = own_VC
        lm_head = weights.pack(self._backend.pack_linear, lm_head_VC, None, is_lm_head=True)
        yield Gather(x="residual")
        yield self._norm(names.final_norm, spec.final_norm, x="residual", out="normed")
        yield Logits(
            name="lm_head", layer=lm_head, x="normed", scale=spec.logit_scale, cap=spec.logit_cap
        )

    def _attention(self, number: int) -> Iterator[Op]:
        layer, names, hidden = (
            self._spec.layers[number],
            self._spec.names,
            self._spec.hidden_size,
        )
        attention = layer.attention
        prefix, head = f"{names.layer.format(number)}.", attention.key_size
        q_size, kv_size = attention.num_heads * head, attention.num_kv_heads * head
        q_heads = self._shard.range_of(attention.num_heads)
        kv_heads = self._shard.kv_heads(attention.num_kv_heads)
        q_range, kv_range = ((first * head, last * head) for first, last in (q_heads, kv_heads))
        qkv = [
            (prefix + names.q, q_size, q_range),
            (prefix + names.k, kv_size, kv_range),
            (prefix + names.v, kv_size, kv_range),
        ]
        qkv = _stacked(qkv)
        weights = self._weights
        x: Value = "residual"
        if "attention_in" in layer.norms:
            x = "normed"
            yield self._norm(prefix + names.attention_in, layer.norm, x="residual", out=x)
        weight_OI = weights.read_fused(qkv, hidden)
        bias_O = weights.read_fused_bias(qkv) if attention.qkv_bias else None
        order_D = channel_order(self._rope(attention.rope), head)
        qk_size = q_range[1] - q_range[0] + kv_range[1] - kv_range[0]
        weight_OI = _reordered(weight_OI, qk_size, order_D, head)
        bias_O = None if bias_O is None else _reordered(bias_O, qk_size, order_D, head)
        packed = weights.pack(self._backend.pack_linear, weight_OI, bias_O)
        yield Linear(name=f"layers.{number}.qkv", layer=packed, x=x, out="qkv")
        norms: dict[str, Any] = {}
        if attention.qk_norm != "none":
            sizes = (head, head) if attention.qk_norm == "head" else (q_size, kv_size)
            q_norm, k_norm = (
                self._norm_fields(prefix + name, layer.norm, size)
                for name, size in zip((names.q_norm, names.k_norm), sizes, strict=True)
            )
            for norm in (q_norm, k_norm):
                weight_C = norm["weight_C"]
                norm["weight_C"] = _reordered(weight_C, len(weight_C), order_D, head)
            norms = {
                "q_norm_D": q_norm["weight_C"],
                "k_norm_D": k_norm["weight_C"],
                "eps": q_norm["eps"],
                "kind": q_norm["kind"],
            }
        options = attention_options(attention, self._max_model_len)
        if attention.sinks:
            sinks_H = weights.read(prefix + names.sinks, (attention.num_heads,), rows=q_heads)
            options = replace(options, sinks=tuple(sinks_H.tolist()))
        yield RotateAndWrite(
            kv=number,
            num_heads=q_heads[1] - q_heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            head_size=head,
            table=self._table(attention.rope),
            options=options,
            x="qkv",
            out="queries",
            q_scale_P=self._query_scale(attention),
            **norms,
        )
        yield Attend(kv=number, scale=attention.scale, options=options, x="queries", out="attended")
        o, o_bias = self._last_layer(
            prefix + names.o,
            q_size,
            q_range,
            has_bias=attention.o_bias,
            num_parts=self._shard.num_parts(attention.num_heads),
        )
        yield Linear(name=f"layers.{number}.o", layer=o, x="attended", out="branch")
        yield from self._add_branch(number, "attention_out", names.attention_out, bias_C=o_bias)

    def _mlp(self, number: int) -> Iterator[Op]:
        layer, names, hidden = (
            self._spec.layers[number],
            self._spec.names,
            self._spec.hidden_size,
        )
        mlp, prefix = layer.mlp, f"{names.layer.format(number)}."
        if isinstance(mlp, Experts):
            assert not layer.parallel
            assert "mlp_in" in layer.norms
            yield self._norm(prefix + names.mlp_in, layer.norm, x="residual", out="normed")
            yield self._experts(number, prefix, mlp)
            yield from self._add_branch(number, "mlp_out", names.mlp_out, is_summed=True)
            return
        mine = self._shard.range_of(mlp.size)
        inputs = (names.gate, names.up) if mlp.gated else (names.up,)
        gate_up = _stacked([(prefix + name, mlp.size, mine) for name in inputs])
        weights = self._weights
        x: Value = "normed" if layer.parallel else "residual"
        if "mlp_in" in layer.norms:
            x = "normed"
            yield self._norm(prefix + names.mlp_in, layer.norm, x="residual", out=x)
        read = (
            weights.read_fused(gate_up, hidden),
            weights.read_fused_bias(gate_up) if mlp.bias else None,
        )
        if mlp.gated:
            packed = weights.pack(self._backend.pack_gated_linear, *read, activation=mlp.activation)
            yield GatedLinear(name=f"layers.{number}.gate_up", layer=packed, x=x, out="hidden")
        else:
            packed = weights.pack(self._backend.pack_linear, *read)
            yield Linear(name=f"layers.{number}.up", layer=packed, x=x, out="hidden")
            yield Activate(x="hidden")
        down, down_bias = self._last_layer(
            prefix + names.down,
            mlp.size,
            mine,
            has_bias=mlp.bias,
            num_parts=self._shard.num_parts(mlp.size // 2),
        )
        yield Linear(name=f"layers.{number}.down", layer=down, x="hidden", out="branch")
        yield from self._add_branch(number, "mlp_out", names.mlp_out, bias_C=down_bias)

    def _experts(self, number: int, prefix: str, experts: described.Experts) -> MixExperts:
        names, weights, hidden = self._spec.names, self._weights, self._spec.hidden_size
        num = experts.num_experts

        router_EC = weights.read(f"{prefix}{names.router}.weight", (num, hidden))
        if experts.shared_gate:
            gate_1C = weights.read(f"{prefix}{names.shared_gate}.weight", (1, hidden))
            router_EC = torch.cat([router_EC, gate_1C])
        shared_kind: SharedExpert = "none"
        if experts.shared is not None:
            shared_kind = "gated" if experts.shared_gate else "plain"
        bias_E = None
        if experts.router_bias:
            bias_E = weights.read(f"{prefix}{names.router}.bias", (num,))
        router = Router(
            layer=weights.pack(self._backend.pack_router, router_EC, bias_E),
            num_experts=num,
            top_k=experts.top_k,
            score=experts.score,
            softmax_after_top_k=experts.softmax_after_top_k,
            correction_E=weights.read(prefix + names.correction, (num,)).float()
            if experts.correction_bias
            else None,
            groups=experts.groups,
            top_groups=experts.top_groups,
            renormalise=experts.renormalise,
            scale=experts.scale,
            shared=shared_kind,
        )
        make, bias_EC = self._expert, None
        if names.experts_turned:
            make = self._turned_expert
            bias_EC = weights.read(
                f"{prefix}{names.experts}{names.expert_down}_bias", (num, hidden)
            )
            weights.check()
            bias_EC = bias_EC.float()
        layers = tuple(make(prefix, experts, expert) for expert in range(num))
        shared = None
        if experts.shared is not None:
            parts = ("gate_proj", "up_proj", "down_proj")
            inner = [f"{prefix}{names.shared}{part}" for part in parts]
            shared = self._mlp_of(*inner, size=experts.shared.size)
        return MixExperts(
            name=f"layers.{number}",
            router=router,
            experts=layers,
            shared=shared,
            bias_EC=bias_EC,
            is_split=self._shard.size > 1,
            x="normed",
            out="branch",
        )

    def _expert(self, prefix: str, experts: described.Experts, number: int) -> Expert:
        names, hidden = self._spec.names, self._spec.hidden_size
        size, start = experts.mlp.size, prefix + names.experts
        parts = (names.expert_gate, names.expert_up, names.expert_down)
        if "{}" in names.experts:
            return self._mlp_of(*(start.format(number) + each for each in parts), size=size)
        first, last = self._shard.range_of(size)
        gate_up_OI = self._weights.read_expert(
            start + names.expert_up,
            (experts.num_experts, 2 * size, hidden),
            number,
            rows=((first, last), (size + first, size + last)),
        )
        up = self._weights.pack(self._backend.pack_gated_linear, gate_up_OI, None)
        down_OI = self._weights.read_expert(
            start + names.expert_down,
            (experts.num_experts, hidden, size),
            number,
            columns=(first, last),
        )
        return Expert(up=up, down=self._pack_down(down_OI, size))

    def _turned_expert(self, prefix: str, experts: described.Experts, number: int) -> Expert:
        """An expert of gpt-oss: biases, a clamped activation, gate and up rows interleaved."""
        names, hidden, weights = self._spec.names, self._spec.hidden_size, self._weights
        mlp, start, num = experts.mlp, prefix + names.experts, experts.num_experts
        first, last = self._shard.range_of(mlp.size)
        up_name, mine = start + names.expert_up, (2 * first, 2 * last)
        gate_up_OI = weights.read_turned_expert(
            up_name, (num, 2 * mlp.size, hidden), number, rows=mine
        )
        bias_EO = weights.read(
            f"{up_name}_bias", (num, 2 * mlp.size), rows=(number, number + 1), columns=mine
        )
        weights.check()
        gate_up_OI, bias_O = (torch.cat([x[::2], x[1::2]]) for x in (gate_up_OI, bias_EO[0]))
        assert mlp.limit is not None
        clamped = Clamped(alpha=mlp.alpha, limit=mlp.limit)
        up = weights.pack(self._backend.pack_gated_linear, gate_up_OI, bias_O, activation=clamped)
        down_OI = weights.read_turned_expert(
            start + names.expert_down, (num, hidden, mlp.size), number, columns=(first, last)
        )
        return Expert(up=up, down=self._pack_down(down_OI, mlp.size))

    def _mlp_of(self, gate: str, up: str, down: str, *, size: int) -> Expert:
        """A gated MLP without biases, from the names of its matrices."""
        hidden, mine, weights = self._spec.hidden_size, self._shard.range_of(size), self._weights
        gate_up = weights.read_fused([(gate, size, mine), (up, size, mine)], hidden)
        packed = weights.pack(self._backend.pack_gated_linear, gate_up, None)
        num_parts = self._shard.num_parts(size // 2)
        last, _ = self._last_layer(down, size, mine, has_bias=False, num_parts=num_parts)
        return Expert(up=packed, down=last)

    def _pack_down(self, down_OI: Tensor | GroupedWeight, size: int) -> LinearLayer:
        num_parts = self._shard.num_parts(size // 2)
        return self._weights.pack(self._backend.pack_linear, down_OI, None, num_parts=num_parts)

    def _rope(self, number: int | None) -> Rope | None:
        return None if number is None else self._spec.ropes[number]

    def _table(self, rope: int | None) -> RotaryTable:
        """The table of all layers with this rotary embedding."""
        if rope not in self._tables:
            self._tables[rope] = rotary_table(
                self._rope(rope),
                self._max_model_len,
                head_size=self._spec.layers[0].attention.key_size,
                device=self._weights.device,
            )
        return self._tables[rope]

    def _query_scale(self, attention: Attention) -> Tensor | None:
        scale_P = query_scale(attention, self._max_model_len)
        return None if scale_P is None else scale_P.to(self._weights.device, self._weights.dtype)

    def _norm(self, name: str, norm: described.Norm, *, x: Value, out: Value) -> Norm:
        return Norm(x=x, out=out, **self._norm_fields(name, norm, self._spec.hidden_size))

    def _norm_fields(self, name: str, norm: described.Norm, size: int) -> dict[str, Any]:
        """A norm's fields of an operation. In float32 a wide norm rounds like any RMS norm."""
        weight_C = self._weights.read(f"{name}.weight", (size,))
        bias_C = self._weights.read(f"{name}.bias", (size,)) if norm.bias else None
        is_layer = norm.kind == "layer"
        is_wide = is_layer or (norm.wide and weight_C.dtype != torch.float32)
        if is_wide or norm.unit_offset:
            weight_C = weight_C.float() + norm.unit_offset
        if is_wide and bias_C is not None:
            bias_C = bias_C.float()
        return {
            "weight_C": weight_C,
            "bias_C": bias_C,
            "eps": norm.eps,
            "kind": "layer" if is_layer else "wide" if is_wide else "rms",
        }

    def _last_layer(
        self, name: str, size: int, mine: tuple[int, int], *, has_bias: bool, num_parts: int
    ) -> tuple[LinearLayer, Tensor | None]:
        """A row-parallel layer with an input of ``size``, and its bias, which the all-reduce adds
        if there are several ranks."""
        hidden, weights = self._spec.hidden_size, self._weights
        matrix_OI = weights.read_matrix(name, (hidden, size), columns=mine)
        bias_O = weights.read(f"{name}.bias", (hidden,)) if has_bias else None
        own_O = bias_O if self._shard.size == 1 else None
        layer = weights.pack(self._backend.pack_linear, matrix_OI, own_O, num_parts=num_parts)
        return layer, bias_O

    def _add_branch(
        self,
        number: int,
        place: described.NormPlace,
        name: str,
        *,
        is_summed: bool = False,
        bias_C: Tensor | None = None,
    ) -> Iterator[Op]:
        """Adds a branch to the residual. ``is_summed``: it was all-reduced, with its bias."""
        layer, prefix = self._spec.layers[number], self._spec.names.layer.format(number)
        if self._shard.size > 1 and not is_summed:
            yield AllReduce(x="branch", bias_C=bias_C)
        if place in layer.norms:
            yield self._norm(f"{prefix}.{name}", layer.norm, x="branch", out="branch")
        yield Add(x="branch", to="residual", scale=layer.residual_scale)


def _is_same(x: Tensor | GroupedWeight, y: Tensor | GroupedWeight) -> bool:
    return isinstance(x, Tensor) and isinstance(y, Tensor) and torch.equal(x, y)


def _stacked(parts: list[Part]) -> list[Part]:
    """Merges parts with the same name, which are consecutive rows of one tensor."""
    sizes, starts = Counter[str](), Counter[str]()
    for name, size, _ in parts:
        sizes[name] += size
    placed = []
    for name, size, (first, last) in parts:
        placed.append((name, sizes[name], (starts[name] + first, starts[name] + last)))
        starts[name] += size
    return placed


_Rows = TypeVar("_Rows", Tensor, Tensor | GroupedWeight)


def _reordered(rows: _Rows, count: int, order_D: Tensor | None, head_size: int) -> _Rows:
    """The first ``count`` rows, reordered by ``order_D`` within each head, then the rest."""
    if order_D is None:
        return rows
    heads = torch.arange(count).view(-1, head_size)[:, order_D.cpu()].flatten()
    index = torch.cat([heads, torch.arange(count, rows.shape[0])])
    return rows[index]
