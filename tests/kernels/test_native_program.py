"""A whole program in one call of the native library, against its operations in plain PyTorch."""

import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import Batch, GreedyEdits, WantedColumns
from quire.kernels.loop import Loop
from quire.kernels.native import ops as native_ops
from quire.kernels.native.backend import NativeBackend
from quire.kernels.native.check import NotNative
from quire.kernels.native.program import NativeProgram
from quire.kernels.ops import (
    Activate,
    Add,
    AddNorm,
    AllReduce,
    Attend,
    Clamped,
    Embed,
    GateActivation,
    GatedLinear,
    Gather,
    KvCache,
    Linear,
    Logits,
    MixExperts,
    Norm,
    NormKind,
    Op,
    Program,
    RotaryTable,
    RotateAndWrite,
    Value,
)
from quire.kernels.quantization import SCALE_BYTES
from quire.kernels.reference.sampling import adjust_logits
from quire.kernels.torch.cpu import CpuBackend
from quire.kernels.torch.experts import Expert, Router

C, H, K, D, F, V, LAYERS, BLOCK = 72, 6, 2, 16, 56, 101, 2, 4
E, X, SHARED = 12, 24, 40
"""Number of experts, inner channels of each, and inner channels of the shared expert."""
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, kw_only=True)
class Style:
    """The differences of a model family from Llama."""

    norm: NormKind = "rms"
    norm_bias: bool = False
    places: tuple[str, ...] = ("in",)
    """Places of norms: before ("in") and after ("out") attention and MLP."""
    parallel: bool = False
    activation: GateActivation | None = "silu"
    """The gate's activation; ``None`` is an MLP with GELU and no gate."""
    all_heads: bool = False
    q_scale: bool = False
    sums: float = 1.0
    logits: dict[str, float] = field(default_factory=dict)
    attention: tuple[AttentionOptions, ...] = (PLAIN, PLAIN)
    scales: tuple[float, ...] = (D**-0.5, D**-0.5)
    router: dict[str, Any] | None = None
    """Fields of `Router`; if set, experts replace the MLP."""
    expert_bias: bool = False
    """Experts have biases and a clamped activation."""


LLAMA = Style()
GEMMA = Style(
    norm="wide",
    places=("in", "out"),
    activation="gelu_tanh",
    logits={"cap": 1.5},
    attention=(AttentionOptions(window=5, soft_cap=2.0), AttentionOptions(soft_cap=2.0)),
    scales=(0.3, 0.4),
)
COHERE = Style(norm="layer", parallel=True, logits={"scale": 0.4}, q_scale=True)
STARCODER = Style(norm="layer", norm_bias=True, activation=None, sums=0.22)
OLMO = Style(places=("out",), all_heads=True, attention=(AttentionOptions(window=6), PLAIN))
MIXTRAL = Style(router={"top_k": 2, "renormalise": True})
QWEN_MOE = Style(router={"top_k": 4, "shared": "gated"})
GLM_MOE = Style(
    router={
        **{"top_k": 3, "score": "sigmoid", "correction_E": torch.linspace(0.1, -0.1, E)},
        **{"groups": 4, "top_groups": 2, "renormalise": True, "scale": 1.5, "shared": "plain"},
    }
)
GPT_OSS = Style(
    router={"top_k": 3, "softmax_after_top_k": True},
    expert_bias=True,
    attention=(AttentionOptions(window=5, sinks=(0.5, -1, 2, 0, -40, 40)), PLAIN),
)
STYLES = {
    **{"llama": LLAMA, "gemma": GEMMA, "cohere": COHERE},
    **{"starcoder": STARCODER, "olmo": OLMO},
    **{"mixtral": MIXTRAL, "qwen-moe": QWEN_MOE, "glm-moe": GLM_MOE, "gpt-oss": GPT_OSS},
}
every_style = pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)


def _program(
    backend: AttentionBackend,
    dtype: torch.dtype,
    *,
    style: Style = LLAMA,
    num_ranks: int = 1,
    lm_head: Any = None,
) -> Program:
    """A program for a rank of ``num_ranks`` that holds all weights. The last layer norms heads."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).div(shape[-1] ** 0.5).to(dtype)

    norm_type = dtype if style.norm == "rms" else torch.float32

    def norm(x: Value = "residual", out: Value = "normed") -> Norm:
        return Norm(
            weight_C=(random(C) + 1).to(norm_type),
            bias_C=random(C).to(norm_type) if style.norm_bias else None,
            eps=1e-5,
            kind=style.norm,
            x=x,
            out=out,
        )

    def head_norm(num_heads: int) -> Tensor:
        return (random(num_heads * D if style.all_heads else D) + 1).to(norm_type)

    def before(*, again: bool = True) -> list[Op]:
        return [norm()] if "in" in style.places and again else []

    def branch(
        name: str, x: Value, weight_CI: Tensor, bias_C: Tensor | None, *, num_parts: int
    ) -> list[Op]:
        """Adds a result to the residual. With several ranks the bias is added to their sum."""
        is_summed = num_ranks > 1
        layer = backend.pack_linear(weight_CI, None if is_summed else bias_C, num_parts=num_parts)
        ops: list[Op] = [Linear(name=name, layer=layer, x=x, out="branch")]
        ops += [AllReduce(x="branch", bias_C=bias_C)] if is_summed else []
        ops += [norm("branch", "branch")] if "out" in style.places else []
        return [*ops, Add(x="branch", to="residual", scale=style.sums)]

    def up(at: str, x: Value) -> list[Op]:
        if style.activation is None:
            layer = backend.pack_linear(random(F, C), random(F))
            return [Linear(name=f"{at}.up", layer=layer, x=x, out="hidden"), Activate(x="hidden")]
        layer = backend.pack_gated_linear(
            random(2 * F, C), random(2 * F), activation=style.activation
        )
        return [GatedLinear(name=f"{at}.gate_up", layer=layer, x=x, out="hidden")]

    def expert(size: int, *, has_bias: bool) -> Expert:
        activation: GateActivation = Clamped(alpha=1.7, limit=0.9) if has_bias else "silu"
        bias_O = random(2 * size) if has_bias else None
        return Expert(
            up=backend.pack_gated_linear(random(2 * size, C), bias_O, activation=activation),
            down=backend.pack_linear(random(C, size), num_parts=4),
        )

    def experts(x: Value) -> list[Op]:
        fields = style.router or {}
        shared = fields.get("shared", "none")
        num_scores = E + (shared == "gated")
        router_bias = random(num_scores) if style.expert_bias else None
        mixed = MixExperts(
            name="layers.0",
            router=Router(
                layer=backend.pack_router(3 * random(num_scores, C), router_bias),
                num_experts=E,
                **fields,
            ),
            experts=tuple(expert(X, has_bias=style.expert_bias) for _ in range(E)),
            shared=None if shared == "none" else expert(SHARED, has_bias=False),
            bias_EC=random(E, C).float() if style.expert_bias else None,
            is_split=num_ranks > 1,
            x=x,
            out="branch",
        )
        return [mixed, Add(x="branch", to="residual")]

    def mlp(at: str, x: Value) -> list[Op]:
        if style.router is not None:
            return experts(x)
        down = branch(f"{at}.down", "hidden", random(C, F), None, num_parts=4)
        return [*up(at, x), *down]

    read: Value = "normed" if "in" in style.places else "residual"
    angles = torch.outer(torch.arange(64.0), 100 ** -torch.linspace(0, 1, D // 2))
    table = RotaryTable(angles.cos(), angles.sin())
    ops: list[Op] = []
    for kv in range(LAYERS):
        at = f"layers.{kv}"
        ops += [
            *before(),
            Linear(
                name=f"{at}.qkv",
                layer=backend.pack_linear(random((H + 2 * K) * D, C), random((H + 2 * K) * D)),
                x=read,
                out="qkv",
            ),
            RotateAndWrite(
                kv=kv,
                num_heads=H,
                num_kv_heads=K,
                head_size=D,
                table=table,
                x="qkv",
                out="queries",
                q_norm_D=head_norm(H) if kv else None,
                k_norm_D=head_norm(K) if kv else None,
                eps=1e-5,
                kind=style.norm,
                options=style.attention[kv],
                q_scale_P=(random(64) + 1) if style.q_scale else None,
            ),
            Attend(
                kv=kv,
                scale=style.scales[kv],
                x="queries",
                out="attended",
                options=style.attention[kv],
            ),
            *branch(f"{at}.o", "attended", random(C, H * D), random(C), num_parts=2),
            *before(again=not style.parallel),
            *mlp(at, read),
        ]
    embedding, last_norm = Embed(weight_VC=random(V, C), out="residual"), norm()
    lm_head = backend.pack_linear(random(V, C)) if lm_head is None else lm_head
    logits = Logits(name="lm_head", layer=lm_head, x="normed", **style.logits)
    return (embedding, *ops, Gather(x="residual"), last_norm, logits)


def _changed(program: Program, kind: type[Op], *, at: int = 0, **fields: Any) -> Program:
    """The program with other fields in one operation of a type."""
    places = [place for place, op in enumerate(program) if isinstance(op, kind)]
    ops: list[Any] = list(program)
    ops[places[at]] = replace(ops[places[at]], **fields)
    return tuple(ops)


def _kv(dtype: torch.dtype, *, int8: bool = False) -> KvCache:
    def cache() -> Tensor:
        if int8:  # these bytes are NaN as scales
            return torch.full((12, BLOCK, K, D + SCALE_BYTES), -1, dtype=torch.int8)
        return torch.full((12, BLOCK, K, D), float("nan"), dtype=dtype)

    return [(cache(), cache()) for _ in range(LAYERS)]


def _native(library: ctypes.CDLL, *, int8: bool) -> NativeBackend:
    return NativeBackend(library, quantization="int8" if int8 else None)


def _batch(rows: list[tuple[list[int], int, list[int]]]) -> Batch:
    """A batch of rows: (all tokens so far, how many of them are computed, blocks)."""
    starts, ids, positions, slots = [0], [], [], []
    tables = torch.zeros(len(rows), 8, dtype=torch.int32)
    for row, (tokens, done, blocks) in enumerate(rows):
        tables[row, : len(blocks)] = torch.tensor(blocks)
        for position in range(done, len(tokens)):
            ids.append(tokens[position])
            positions.append(position)
            slots.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(ids))
    return Batch(
        token_ids_T=torch.tensor(ids),
        positions_T=torch.tensor(positions),
        slot_mapping_T=torch.tensor(slots),
        block_tables_BM=tables,
        seq_lens_B=torch.tensor([len(tokens) for tokens, _, _ in rows], dtype=torch.int32),
        query_starts_B1=torch.tensor(starts, dtype=torch.int32),
        last_tokens_S=torch.tensor(starts[1:]) - 1,
        num_decodes=0,
        max_query_len=max(len(tokens) - done for tokens, done, _ in rows),
        max_seq_len=max(len(tokens) for tokens, _, _ in rows),
    )


A = ([7, 3, 99, 0, 5, 5, 81], [3, 9])
B = (list(range(40, 61)), [1, 5, 2, 8, 11, 4])
FIRST = _batch([(A[0], 0, A[1]), (B[0][:20], 0, B[1])])
SECOND = _batch([(B[0], 20, B[1]), (A[0] + [6, 2], 7, [3, 9, 10])])


def _native_program(
    backend: NativeBackend, dtype: torch.dtype, *, style: Style = LLAMA, num_ranks: int = 1
) -> NativeProgram:
    runner = backend.prepare(_program(backend, dtype, style=style, num_ranks=num_ranks))
    assert isinstance(runner, NativeProgram)
    return runner


def _same(x: Tensor) -> Tensor:
    return x


@pytest.mark.quick_cells(12)
@every_style
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_logits_are_those_of_plain_pytorch(
    library: ctypes.CDLL, dtype: torch.dtype, int8: bool, style: Style
) -> None:
    if style.router is not None and (int8 or dtype != torch.float32):
        # All experts, since a rounding may change the routing.
        router = style.router | {"top_k": E, "groups": 1, "top_groups": 1}
        style = replace(style, router=router)
    decoder = _native_program(_native(library, int8=int8), dtype, style=style)
    kv, plain_kv = _kv(dtype, int8=int8), _kv(dtype, int8=int8)
    plain = CpuBackend(quantization="int8" if int8 else None)
    loop = Loop(plain, _program(plain, dtype, style=style))
    for batch in (FIRST, SECOND):
        logits = decoder.forward(batch, kv, all_reduce=_same)
        expected = loop.forward(batch, plain_kv, all_reduce=_same)
        # A last bit may round another 127th.
        tolerance = 0.12 if int8 else {torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


@pytest.mark.quick_cells(24)
@every_style
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_one_call_gives_the_bits_of_many(
    library: ctypes.CDLL, int8: bool, dtype: torch.dtype, threads: int, style: Style
) -> None:
    # Without operations that the loop computes in PyTorch.
    style = replace(style, logits={}, activation=style.activation or "gelu_tanh")
    backend = _native(library, int8=int8)
    kv, parts_kv = _kv(dtype, int8=int8), _kv(dtype, int8=int8)
    decoder = _native_program(backend, dtype, style=style)
    loop = Loop(backend, _program(backend, dtype, style=style))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch in (FIRST, SECOND):
            logits = decoder.forward(batch, kv, all_reduce=_same)
            parts = loop.forward(batch, parts_kv, all_reduce=_same)
            torch.testing.assert_close(logits.to(dtype), parts.to(dtype), atol=0, rtol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.quick_cells(12)
@every_style
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_call_by_call_gives_the_bits_of_one_call(
    library: ctypes.CDLL, dtype: torch.dtype, int8: bool, style: Style
) -> None:
    backend, sums = _native(library, int8=int8), 0

    def all_reduce(x: Tensor) -> Tensor:
        nonlocal sums
        sums += 1
        assert x.dtype == torch.float32
        return x

    kv, shared_kv = _kv(dtype, int8=int8), _kv(dtype, int8=int8)
    alone, shared = (
        _native_program(backend, dtype, style=style, num_ranks=ranks) for ranks in (1, 2)
    )
    for batch in (FIRST, SECOND):
        logits = alone.forward(batch, kv, all_reduce=_same)
        assert torch.equal(shared.forward(batch, shared_kv, all_reduce=all_reduce), logits)
    assert sums == 2 * 2 * LAYERS


@pytest.mark.quick_cells(9)
@pytest.mark.parametrize("style", [LLAMA, GEMMA, COHERE], ids=["llama", "gemma", "cohere"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_greatest_logit_of_a_row_is_found_without_its_logits(
    library: ctypes.CDLL, dtype: torch.dtype, threads: int, style: Style
) -> None:
    backend = NativeBackend(library)
    # Columns from 57 on repeat 0 to 56, so that every maximum occurs twice.
    rows = torch.randn(57, C, generator=torch.Generator().manual_seed(3)).to(dtype)
    lm_head = backend.pack_linear(torch.cat([rows, rows]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for num_ranks in (1, 2):
            program = _program(backend, dtype, style=style, num_ranks=num_ranks, lm_head=lm_head)
            decoder = NativeProgram(library, program)
            logits = decoder.forward(FIRST, _kv(dtype), all_reduce=_same)
            for num_greedy in (1, 2):
                greatest = torch.full((num_greedy, 2), 7.0)
                rest = decoder.forward(FIRST, _kv(dtype), all_reduce=_same, greatest_G2=greatest)
                assert torch.equal(rest, logits[: 2 - num_greedy])
                row_logits = [row.tolist() for row in logits[2 - num_greedy :]]
                assert greatest.tolist() == [[max(row), row.index(max(row))] for row in row_logits]
            for edits, adjusted in _edits_of(logits):
                chosen = torch.zeros(2, 2)
                decoder.forward(
                    FIRST, _kv(dtype), all_reduce=_same, greatest_G2=chosen, edits=edits
                )
                values, columns = adjusted.max(dim=1).values, adjusted.argmax(dim=1)
                assert chosen.tolist() == torch.stack([values, columns], 1).tolist()
    finally:
        torch.set_num_threads(before)


@pytest.mark.quick_cells(8)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "w4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_wanted_logits_have_the_bits_that_they_have_among_all(
    library: ctypes.CDLL, kind: str, threads: int
) -> None:
    """With any other rows, in any order, for any rank's columns."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    packed: dict[str, Any] = {"quantization": kind} if kind in ("int8", "w4") else {}
    backend = NativeBackend(library, **packed)
    rng = torch.Generator().manual_seed(7)
    lm_head = backend.pack_linear(torch.randn(1000, C, generator=rng).to(dtype))
    decoder = NativeProgram(library, _program(backend, dtype, lm_head=lm_head))
    num_samples = 26
    batch = replace(FIRST, last_tokens_S=torch.arange(num_samples).int())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = decoder.forward(batch, _kv(dtype), all_reduce=_same)
        for first_column, density in itertools.product((0, 5, 64), (0.0, 0.02, 0.4, 1.0)):
            bits = torch.rand(4, 1100, generator=rng) < density
            mask_KW = torch.from_numpy(
                np.packbits(np.pad(bits.numpy(), ((0, 0), (0, 20))), axis=1, bitorder="little")
            ).view(torch.int32)
            mask_of_S = torch.randint(-1, 4, (num_samples,), generator=rng).int()
            wanted = WantedColumns(mask_of_S=mask_of_S, mask_KW=mask_KW, first_column=first_column)
            some = decoder.forward(batch, _kv(dtype), all_reduce=_same, wanted=wanted)
            for row, mask in enumerate(mask_of_S.tolist()):
                columns = bits[mask, first_column:][:1000] if mask >= 0 else torch.ones(1000) > 0
                assert torch.equal(some[row, columns], logits[row, columns])
            greatest = torch.zeros(num_samples, 2)
            decoder.forward(
                batch, _kv(dtype), all_reduce=_same, greatest_G2=greatest, wanted=wanted
            )
            for row, mask in enumerate(mask_of_S.tolist()):
                if mask < 0:
                    assert int(greatest[row, 1]) == int(logits[row].argmax())
    finally:
        torch.set_num_threads(before)


def _edits_of(logits_GV: Tensor) -> Iterator[tuple[GreedyEdits, Tensor]]:
    """Edits of two rows, and their logits after these by the plain kernel."""
    generator = torch.Generator().manual_seed(4)
    num_columns = logits_GV.shape[1]
    best_GV = logits_GV.argsort(dim=1, descending=True)
    for number, first_column in itertools.product((0, 1, 7, 60), (0, 5)):
        ids_GN = best_GV[:, :number].sort(dim=1).values
        others_GN = torch.stack([torch.randperm(num_columns, generator=generator)] * 2)
        seen_GN = others_GN[:, : number // 2 + 1].sort(dim=1).values
        mask_KW = torch.randint(-(2**31), 2**31 - 1, (1, 3), generator=generator).int()
        rows, starts = torch.arange(2).int(), torch.arange(3)
        bias = torch.randn(ids_GN.numel(), generator=generator) * 3
        bias[::3] = -torch.inf
        counts = torch.arange(seen_GN.numel()).int() % 3
        penalties = torch.tensor([[0.5, -0.25], [0.3, 0.7], [1.3, 0.8]])
        names = ("presence", "frequency", "repetition")
        wide = torch.full((2, num_columns + first_column), -torch.inf)
        wide[:, first_column:] = logits_GV
        adjust_logits(
            wide,
            biased_rows_A=rows.repeat_interleave(number),
            biased_ids_A=(ids_GN + first_column).flatten().int(),
            bias_A=bias,
            seen_rows_E=rows.repeat_interleave(seen_GN.shape[1]),
            seen_ids_E=(seen_GN + first_column).flatten().int(),
            seen_counts_E=counts,
            **{f"{name}_S": each for name, each in zip(names, penalties, strict=True)},
            masked_rows_K=rows[1:],
            mask_KW=mask_KW,
        )
        yield (
            GreedyEdits(
                biased_starts_G1=starts * number,
                biased_ids_A=(ids_GN + first_column).flatten().int(),
                bias_A=bias,
                seen_starts_G1=starts * seen_GN.shape[1],
                seen_ids_E=(seen_GN + first_column).flatten().int(),
                seen_counts_E=counts,
                **{f"{name}_G": each for name, each in zip(names, penalties, strict=True)},
                mask_of_G=torch.tensor([-1, 0]).int(),
                mask_KW=mask_KW,
                first_column=first_column,
            ),
            wide[:, first_column:],
        )


@pytest.mark.parametrize("fields", [MIXTRAL.router, QWEN_MOE.router, GLM_MOE.router])
def test_experts_are_chosen_as_in_plain_pytorch(
    library: ctypes.CDLL, fields: dict[str, Any]
) -> None:
    native, plain = NativeBackend(library), CpuBackend()
    gated = fields.get("shared") == "gated"
    layer = plain.pack_router(torch.eye(E + gated))
    router = Router(layer=layer, num_experts=E, **fields)
    scores = torch.randn(300, E + gated, generator=torch.Generator().manual_seed(5))
    scores[:50] = scores[:50].round()  # Many are equal.
    scores[50] = 0
    scores[51] *= 40
    chosen_Tk, weights_TS = native.choose_experts(router, scores)
    expected_Tk, expected_TS = plain.choose_experts(router, scores)
    assert torch.equal(chosen_Tk, expected_Tk)
    torch.testing.assert_close(weights_TS, expected_TS, atol=1e-6, rtol=1e-5)
    for rows in ([7], [299, 3, 3]):
        again = native.choose_experts(router, scores[rows])
        assert torch.equal(again[0], chosen_Tk[rows])
        assert torch.equal(again[1], weights_TS[rows])


def test_of_scores_that_are_nan_distinct_experts_are_chosen(library: ctypes.CDLL) -> None:
    backend = NativeBackend(library)
    layer = backend.pack_router(torch.zeros(E, C))
    fields = {name: value for name, value in (GLM_MOE.router or {}).items() if name != "shared"}
    router = Router(layer=layer, num_experts=E, **fields)
    chosen_Tk, _ = backend.choose_experts(router, torch.full((2, E), float("nan")))
    assert all(len(set(chosen_k)) == 3 for chosen_k in chosen_Tk.tolist())
    assert chosen_Tk.ge(0).all()
    assert chosen_Tk.lt(E).all()


def test_experts_that_do_not_fit_are_refused_or_left_to_the_loop(library: ctypes.CDLL) -> None:
    backend = NativeBackend(library)
    program = _program(backend, torch.float32, style=MIXTRAL)
    mixed = next(op for op in program if isinstance(op, MixExperts))
    up, down = mixed.experts[0].up, mixed.experts[0].down
    swapped = replace(mixed.experts[0], up=down, down=up)
    with pytest.raises(ValueError, match=r"expert of \(type, inputs, outputs, gated\)"):
        NativeProgram(library, _changed(program, MixExperts, experts=(swapped,) * E))
    with pytest.raises(ValueError, match=r"experts .* \(11, False\); the router takes 2 of"):
        NativeProgram(library, _changed(program, MixExperts, experts=mixed.experts[1:]))
    plain = replace(mixed.experts[0], down=CpuBackend().pack_linear(torch.zeros(C, X)))
    with pytest.raises(NotNative, match="expert of PackedLinear and PlainLinear"):
        NativeProgram(library, _changed(program, MixExperts, experts=(plain,) * E))


def test_a_row_of_nan_has_column_0_as_its_greatest(library: ctypes.CDLL) -> None:
    backend = NativeBackend(library)
    program = _program(backend, torch.float32)
    broken = _changed(program, Norm, at=-1, weight_C=torch.full((C,), float("nan")))
    decoder = NativeProgram(library, broken)
    greatest = torch.full((2, 2), 7.0)
    decoder.forward(FIRST, _kv(torch.float32), all_reduce=_same, greatest_G2=greatest)
    assert greatest[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, token_ids_T=b.token_ids_T + V), "token id 200, must be below 101"),
        (lambda b: replace(b, positions_T=b.positions_T - 1), "position -1, must be below 64"),
        (lambda b: replace(b, slot_mapping_T=b.slot_mapping_T + 8), "slot 55, must be below 48"),
        (
            lambda b: replace(b, last_tokens_S=b.last_tokens_S + 1),
            "last token 27, must be below 27",
        ),
        (
            lambda b: replace(b, last_tokens_S=b.last_tokens_S - 9),
            "last token -3, must be below 27",
        ),
        (
            lambda b: replace(b, block_tables_BM=b.block_tables_BM + 1),
            r"block id 12, must be below 12 \(at 1\)",
        ),
        (
            lambda b: replace(b, block_tables_BM=b.block_tables_BM - 2),
            r"block id -1, must be below 12 \(at 1\)",
        ),
        (
            lambda b: replace(b, seq_lens_B=b.seq_lens_B + 13),
            r"length of a sequence 33, must be from 20 to 32 \(at 1\)",
        ),
        (
            lambda b: replace(b, seq_lens_B=b.seq_lens_B - 1),
            r"length of a sequence 6, must be from 7 to 32 \(at 0\)",
        ),
        (
            lambda b: replace(b, query_starts_B1=b.query_starts_B1 * 2),
            r"start of queries 54, must be from 14 to 27 \(at 2\)",
        ),
        (
            lambda b: replace(b, query_starts_B1=b.query_starts_B1.flip(0)),
            r"start of queries 7, must be from 27 to 27 \(at 1\)",
        ),
    ],
)
def test_a_wrong_index_is_refused(
    library: ctypes.CDLL, change: Callable[[Batch], Batch], message: str
) -> None:
    decoder = _native_program(NativeBackend(library), torch.float32)
    with pytest.raises(IndexError, match=message):
        decoder.forward(change(FIRST), _kv(torch.float32), all_reduce=_same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, positions_T=b.positions_T[1:]), r"positions: .*\(26,\).*\(27,\)"),
        (lambda b: replace(b, slot_mapping_T=b.slot_mapping_T[1:]), "slots: .*int64"),
        (lambda b: replace(b, token_ids_T=b.token_ids_T.int()), "token_ids: torch.int32"),
        (lambda b: replace(b, query_starts_B1=b.query_starts_B1[:2]), "query starts: "),
        (lambda b: replace(b, block_tables_BM=b.block_tables_BM[:1]), r"tables: .*\(1, 8\)"),
        (lambda b: replace(b, block_tables_BM=b.block_tables_BM.long()), "tables: torch.int64"),
        (lambda b: replace(b, block_tables_BM=b.block_tables_BM.T), r"tables: .*\(8, 2\)"),
    ],
)
def test_a_batch_of_the_wrong_shape_or_type_is_refused(
    library: ctypes.CDLL, change: Callable[[Batch], Batch], message: str
) -> None:
    decoder = _native_program(NativeBackend(library), torch.float32)
    with pytest.raises(ValueError, match=message):
        decoder.forward(change(FIRST), _kv(torch.float32), all_reduce=_same)


def test_caches_that_do_not_fit_are_refused_and_the_last_that_did_stay_in_use(
    library: ctypes.CDLL,
) -> None:
    decoder, kv = _native_program(NativeBackend(library), torch.float32), _kv(torch.float32)
    logits = decoder.forward(FIRST, kv, all_reduce=_same)
    k_cache, v_cache = _kv(torch.float32)[1]
    for wrong, message in [
        (kv[:1], "1 layers: the model has 2"),
        ([kv[0], (k_cache[:11], v_cache[:11])], r"\(11, 4\) blocks"),
        ([kv[0], (k_cache, v_cache[:11])], "V cache"),
        ([kv[0], (k_cache, v_cache.bfloat16())], "V cache: torch.bfloat16"),
        ([kv[0], (k_cache, v_cache.transpose(1, 2))], "V cache"),
        ([(x.view(8, 6, K, D), y.view(8, 6, K, D)) for x, y in kv], "blocks of 6 tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder.forward(FIRST, wrong, all_reduce=_same)
        assert torch.equal(decoder.forward(FIRST, kv, all_reduce=_same), logits)


def test_weights_that_do_not_fit_each_other_are_refused(library: ctypes.CDLL) -> None:
    backend = NativeBackend(library)
    program = _program(backend, torch.float32)
    layers = {op.name: op.layer for op in program if isinstance(op, Linear | GatedLinear | Logits)}
    (table, *_) = (op.table for op in program if isinstance(op, RotateAndWrite))
    embedding_VC = program[0].weight_VC  # type: ignore[union-attr]
    qkv, o, gate_up, down = (layers[f"layers.0.{x}"] for x in ("qkv", "o", "gate_up", "down"))
    wide = backend.pack_linear(torch.zeros(V, C + 2))
    changes: list[tuple[type[Op], dict[str, Any], str]] = [
        (Embed, {"weight_VC": embedding_VC.T}, "embedding"),
        (Embed, {"weight_VC": embedding_VC[:, 1:].contiguous()}, "a norm's weight"),
        (Logits, {"layer": wide}, "lm_head"),
        (Norm, {"at": -1, "weight_C": torch.zeros(2 * C)[::2]}, "norm's weight"),
        (Norm, {"at": 1, "weight_C": torch.zeros(C - 1)}, "norm's weight"),
        (Linear, {"at": 2, "layer": o}, r"layers.0.down, of .* 96, .*: must be .* 56, "),
        (Linear, {"at": 1, "layer": qkv}, r"layers.0.o, of .* 72, .*: must be .* 96, "),
        (Linear, {"at": 0, "layer": gate_up}, "layers.0.qkv, of .* True.*: must be .* False"),
        (Linear, {"at": 0, "layer": wide}, "layers.0.qkv, of .* 74, .*: must be .* 72, "),
        (GatedLinear, {"layer": down}, "layers.0.gate_up"),
        (RotateAndWrite, {"q_norm_D": torch.ones(D + 1)}, "a head's norm"),
        (RotateAndWrite, {"table": RotaryTable(table.cos_PR.double(), table.sin_PR)}, "cos"),
        (RotateAndWrite, {"table": RotaryTable(table.cos_PR, table.sin_PR[:9])}, "sin"),
    ]
    for kind, changed, message in changes:
        with pytest.raises(ValueError, match=message):
            backend.prepare(_changed(program, kind, **changed))
    narrow = backend.pack_linear(torch.zeros(C - 2, H * D))
    with pytest.raises(ValueError, match=r"layers\.0\.o of 70 outputs: must be 72"):
        backend.prepare(_changed(program, Linear, at=1, layer=narrow))
    other = tuple(
        replace(op, num_heads=5) if isinstance(op, RotateAndWrite) else op for op in program
    )
    with pytest.raises(ValueError, match="5 query heads: must be a multiple of 2"):
        backend.prepare(other)


def test_no_more_rows_are_sampled_than_there_are_tokens_or_are_greedy(library: ctypes.CDLL) -> None:
    decoder = _native_program(NativeBackend(library), torch.float32)
    for greatest, message in [
        (torch.zeros(3, 2), "27 tokens, 2 sampled rows, 3 of them greedy"),
        (torch.zeros(2, 3), "greatest logits"),
        (torch.zeros(2, 2).double(), "greatest logits"),
    ]:
        with pytest.raises(ValueError, match=message):
            decoder.forward(FIRST, _kv(torch.float32), all_reduce=_same, greatest_G2=greatest)
    often = replace(FIRST, last_tokens_S=torch.zeros(28, dtype=torch.int64))
    with pytest.raises(ValueError, match="27 tokens, 28 sampled rows"):
        decoder.forward(often, _kv(torch.float32), all_reduce=_same)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scale:
    x: str


def test_what_the_library_cannot_run_goes_through_the_loop_and_is_said(
    library: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    backend = NativeBackend(library)
    program = _program(backend, torch.float32)
    plain = CpuBackend().pack_linear(torch.zeros(C, H * D))
    heads = [op for op in program if isinstance(op, RotateAndWrite)]
    small = tuple(replace(op, head_size=8) if op in heads else op for op in program)
    gather = next(place for place, op in enumerate(program) if isinstance(op, Gather))
    for wrong, message in [
        (_program(backend, torch.float16), "no native dtype torch.float16"),
        (small, "no native RotateAndWrite.head_size=8"),
        (
            _changed(program, RotateAndWrite, num_kv_heads=3),
            "no native layers of unlike heads",
        ),
        (_changed(program, Linear, at=1, layer=plain), "no native layers.0.o, a PlainLinear"),
        ((*program[:-1], Scale(x="normed"), program[-1]), "no native operation Scale"),
        (program[:gather] + program[gather + 1 :], "no native end Linear, Norm, Logits"),
        (program[: gather + 1] + program[gather + 2 :], "no native end Linear, Gather, Logits"),
        (
            (program[0], Add(x="normed", to="residual"), *program[1:]),
            "no native Add of 'normed'",
        ),
        ((program[0], AllReduce(x="residual"), *program[1:]), "no native AllReduce.x='residual'"),
    ]:
        caplog.clear()
        runner = backend.prepare(wrong)  # type: ignore[arg-type]
        assert isinstance(runner, Loop)
        (said,) = caplog.messages
        assert message in said


READ: dict[type[Op], set[str]] = {
    Embed: {"weight_VC", "out"},
    Norm: {"weight_C", "eps", "x", "out", "kind", "bias_C"},
    Linear: {"name", "layer", "x", "out", "adds"},
    GatedLinear: {"name", "layer", "x", "out"},
    Activate: {"x"},
    MixExperts: {"name", "router", "experts", "shared", "bias_EC", "is_split", "x", "out"},
    RotateAndWrite: {
        "kv",
        "num_heads",
        "num_kv_heads",
        "head_size",
        "table",
        "x",
        "out",
        "q_norm_D",
        "k_norm_D",
        "eps",
        "kind",
        "options",
        "q_scale_P",
    },
    Attend: {"kv", "scale", "x", "out", "options"},
    AllReduce: {"x", "bias_C"},
    Add: {"x", "to", "scale"},
    Gather: {"x"},
    Logits: {"name", "layer", "x", "scale", "cap"},
}
"""Fields of operations that `quire.kernels.native.ops` reads; it must read or refuse new ones."""


def test_the_library_knows_all_fields_of_all_operations() -> None:
    assert {kind: {each.name for each in fields(kind)} for kind in READ} == READ
    assert set(READ) == set(get_args(Op)) - {AddNorm}


def test_an_operation_that_the_library_does_not_have_is_refused(library: ctypes.CDLL) -> None:
    program = _program(NativeBackend(library), torch.float32)
    fused = AddNorm(weight_C=torch.ones(C), eps=1e-5, x="branch", to="residual", out="normed")
    with pytest.raises(NotNative, match="operation AddNorm"):
        native_ops.NativeOps((*program[:1], fused, *program[1:]))
