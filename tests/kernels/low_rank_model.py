"""A small model and its LoRA adapters, on one rank or several, for `test_low_rank.py`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import Batch
from quire.kernels.ops import (
    AdapterLayers,
    Add,
    AllReduce,
    Attend,
    Embed,
    GatedLinear,
    Gather,
    KvCache,
    Linear,
    Logits,
    LowRank,
    MixExperts,
    Norm,
    Op,
    Program,
    RotaryTable,
    RotateAndWrite,
)
from quire.kernels.torch.experts import Expert, Router

C, H, K, D, F, V, LAYERS, BLOCK = 80, 8, 4, 16, 176, 101, 2, 4
"""Sizes. The last layer's MLP is a mixture of experts with a shared expert of F channels."""
E, X, TOP = 4, 16, 2
DTYPES = [torch.float32, torch.bfloat16]
PARTS = 8
"""Number of parts of a sum over all ranks."""
SIZES = {"q": H * D, "k": K * D, "v": K * D, "o": C, "gate": F, "up": F, "down": C}
INPUTS = {"o": H * D, "down": F}

Full = dict[str, Tensor]
"""Whole matrices by "layer.matrix"."""
Adapter = dict[str, tuple[Tensor, Tensor, float]]
"""A, B and the scale by "layer.matrix"."""


def make_weights() -> Full:
    rng = torch.Generator().manual_seed(0)
    return {
        f"{layer}.{name}": torch.randn(size, INPUTS.get(name, C), generator=rng) / C**0.5
        for layer in range(LAYERS)
        for name, size in SIZES.items()
    }


def make_adapter(seed: int, ranks: dict[str, int], *, scale: float = 0.5) -> Adapter:
    rng = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(LAYERS):
        for name, rank in ranks.items():
            a = torch.randn(rank, INPUTS.get(name, C), generator=rng).div(C**0.5).bfloat16()
            b = torch.randn(SIZES[name], rank, generator=rng).div(rank**0.5).bfloat16()
            made[f"{layer}.{name}"] = (a.float(), b.float(), scale * (1 + layer))
    return made


ALL = dict.fromkeys(SIZES, 8)
ADAPTERS = [
    make_adapter(1, ALL),
    make_adapter(2, {"q": 3, "v": 16, "o": 5, "down": 1}, scale=2.0),
    make_adapter(3, {"k": 40, "gate": 1, "up": 17}, scale=-0.25),
    make_adapter(4, {"o": 33}),
    make_adapter(5, {"q": 256, "gate": 16, "down": 256}, scale=0.1),
]


def merged(weights: Full, adapter: Adapter) -> Full:
    added = {
        name: (weights[name].double() + scale * (b.double() @ a.double())).float()
        for name, (a, b, scale) in adapter.items()
    }
    return weights | added


def _rows(name: str, rank: int, size: int) -> slice:
    """A rank's slice of a matrix's outputs, or of its inputs if it is one of `INPUTS`."""
    whole = INPUTS.get(name, SIZES[name])
    return slice(whole * rank // size, whole * (rank + 1) // size)


def layers_of(
    adapter: Adapter, dtype: torch.dtype, *, rank: int = 0, size: int = 1
) -> AdapterLayers:
    """One rank's share of the adapter's layers."""
    layers: dict[str, tuple[LowRank, ...]] = {}
    firsts = {"k": SIZES["q"] // size, "v": (SIZES["q"] + SIZES["k"]) // size, "up": F // size}
    for at, (a, b, scale) in adapter.items():
        layer, name = at.split(".")
        mine = _rows(name, rank, size)
        a, b = (a[:, mine], b) if name in INPUTS else (a, b[mine])
        where = "qkv" if name in "qkv" else "gate_up" if name in ("gate", "up") else name
        shared = "shared." if layer == str(LAYERS - 1) and where in ("gate_up", "down") else ""
        part = LowRank(
            a_RI=a.to(dtype), b_OR=b.to(dtype), first_row=firsts.get(name, 0), scale=scale
        )
        key = f"layers.{layer}.{shared}{where}"
        layers[key] = (*layers.get(key, ()), part)
    return layers


def make_program(
    backend: AttentionBackend,
    dtype: torch.dtype,
    weights: Full,
    *,
    rank: int = 0,
    size: int = 1,
    has_bias: bool = True,
) -> Program:
    rng = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).div(shape[-1] ** 0.5).to(dtype)

    def mine(layer: int, *names: str) -> Tensor:
        parts = []
        for name in names:
            whole, rows = weights[f"{layer}.{name}"].to(dtype), _rows(name, rank, size)
            parts.append(whole[:, rows] if name in INPUTS else whole[rows])
        return torch.cat(parts).contiguous()

    def summed(name: str, layer: int, x: Any) -> list[Op]:
        bias = random(C) if has_bias else None
        own = bias if size == 1 else None
        packed = backend.pack_linear(mine(layer, name), own, num_parts=PARTS // size)
        return [
            Linear(name=f"layers.{layer}.{name}", layer=packed, x=x, out="branch"),
            *([AllReduce(x="branch", bias_C=bias)] if size > 1 else []),
            Add(x="branch", to="residual"),
        ]

    def norm() -> Norm:
        return Norm(weight_C=(random(C) + 1), eps=1e-5, x="residual", out="normed")

    def expert() -> Expert:
        up, down = random(2 * X, C), random(C, X)
        channels = slice(X * rank // size, X * (rank + 1) // size)
        up = torch.cat([up[:X][channels], up[X:][channels]])
        down = down[:, channels].contiguous()
        return Expert(
            up=backend.pack_gated_linear(up),
            down=backend.pack_linear(down, num_parts=PARTS // size),
        )

    angles = torch.outer(torch.arange(64.0), 100 ** -torch.linspace(0, 1, D // 2))
    ops: list[Op] = [Embed(weight_VC=random(V, C), out="residual")]
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        qkv_bias = random((H + 2 * K) * D)[: (H + 2 * K) * D // size].zero_()
        gate_up = backend.pack_gated_linear(mine(layer, "gate", "up"))
        ops += [
            norm(),
            Linear(
                name=f"{at}.qkv",
                layer=backend.pack_linear(mine(layer, "q", "k", "v"), qkv_bias),
                x="normed",
                out="qkv",
            ),
            RotateAndWrite(
                kv=layer,
                num_heads=H // size,
                num_kv_heads=K // size,
                head_size=D,
                table=RotaryTable(angles.cos(), angles.sin()),
                x="qkv",
                out="queries",
            ),
            Attend(kv=layer, scale=D**-0.5, x="queries", out="attended"),
            *summed("o", layer, "attended"),
            norm(),
        ]
        if layer < LAYERS - 1:
            ops += [GatedLinear(name=f"{at}.gate_up", layer=gate_up, x="normed", out="hidden")]
            ops += summed("down", layer, "hidden")
            continue
        down = backend.pack_linear(mine(layer, "down"), num_parts=PARTS // size)
        router = Router(
            layer=backend.pack_router(3 * random(E + 1, C)),
            num_experts=E,
            top_k=E,  # All experts, since a rounding may change the routing.
            shared="gated",
        )
        mixed = MixExperts(
            name=at,
            router=router,
            experts=tuple(expert() for _ in range(E)),
            shared=Expert(up=gate_up, down=down),
            bias_EC=None,
            is_split=size > 1,
            x="normed",
            out="branch",
        )
        ops += [mixed, Add(x="branch", to="residual")]
    lm_head = backend.pack_linear(random(V, C))
    logits = Logits(name="lm_head", layer=lm_head, x="normed")
    return (*ops, Gather(x="residual"), norm(), logits)


def make_kv(dtype: torch.dtype, *, size: int = 1) -> KvCache:
    shape = (64, BLOCK, K // size, D)
    return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2)]


def _tokens(number: int) -> list[int]:
    """Prompt ``number``; some are longer than a tile of tokens."""
    length = (1, 5, 13, 2, 9, 30, 1, 3)[number % 8]
    return [(7 * number + 11 * place) % V for place in range(length)]


def make_batch(prompts: Sequence[int], slots: Sequence[int] | None) -> Batch:
    """A row for each prompt number, with its adapter's slot. All tokens are sampled."""
    starts, ids, positions, places, of = [0], [], [], [], []
    tables = torch.zeros(len(prompts), 8, dtype=torch.int32)
    for row, number in enumerate(prompts):
        tokens = _tokens(number)
        blocks = [(row * 8 + i) % 64 for i in range(8)]
        tables[row] = torch.tensor(blocks)
        for position, token in enumerate(tokens):
            ids.append(token)
            positions.append(position)
            places.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
            of.append(-1 if slots is None else slots[row])
        starts.append(len(ids))
    lens = torch.tensor(starts).diff()
    return Batch(
        token_ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        slot_mapping_T=torch.tensor(places),
        block_tables_BM=tables,
        seq_lens_B=lens.int(),
        query_starts_B1=torch.tensor(starts, dtype=torch.int32),
        last_tokens_S=torch.arange(len(ids)),
        num_decodes=0,
        max_query_len=int(lens.max()),
        max_seq_len=int(lens.max()),
        adapter_slots_T=None if slots is None else torch.tensor(of, dtype=torch.int32),
    )
