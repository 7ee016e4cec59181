"""Rewrites of programs, which fuse or reorder operations, keep the bits of their results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.kernels.batch import Batch
from quire.kernels.loop import Loop
from quire.kernels.ops import (
    Add,
    AddNorm,
    AllReduce,
    Embed,
    Gather,
    Linear,
    Logits,
    Norm,
    Op,
    Program,
)
from quire.kernels.rewrites import fuse_add_norm, fuse_linear_add, gather_before_add
from quire.kernels.torch.cpu import CpuBackend

C, V, T = 24, 50, 9
SUM: list[Op] = [Add(x="branch", to="residual")]


def a_program(
    dtype: torch.dtype, *, num_ranks: int, between: list[Op] | None = None, is_int8: bool = False
) -> Program:
    """Two layers of a norm and a product; `SUM` or ``between`` adds it to the residual."""
    rng = torch.Generator().manual_seed(1)
    backend = CpuBackend(quantization="int8" if is_int8 else None)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    def norm() -> Norm:
        return Norm(weight_C=random(C), eps=1e-5, x="residual", out="normed")

    ops: list[Op] = [Embed(weight_VC=random(V, C), out="residual")]
    for number in range(2):
        layer = backend.pack_linear(random(C, C), random(C))
        ops += [norm(), Linear(name=f"{number}", layer=layer, x="normed", out="branch")]
        ops += [AllReduce(x="branch")] * (num_ranks > 1) + (between or SUM)
    head = backend.pack_linear(random(V, C))
    return (*ops, Gather(x="residual"), norm(), Logits(name="head", layer=head, x="normed"))


def logits(program: Program) -> Tensor:
    ints = torch.zeros(1, dtype=torch.int32)
    batch = Batch(
        token_ids_T=torch.arange(T),
        positions_T=torch.arange(T),
        slot_mapping_T=torch.arange(T),
        block_tables_BM=ints[None],
        seq_lens_B=ints,
        query_starts_B1=torch.tensor([0, T], dtype=torch.int32),
        last_tokens_S=torch.tensor([3, T - 1]),
        num_decodes=0,
        max_query_len=T,
        max_seq_len=T,
    )
    return Loop(CpuBackend(), program).forward(batch, [], all_reduce=lambda x: x * 2)


def kinds(program: Program) -> list[type]:
    return [type(op) for op in program]


def everything(program: Program) -> Program:
    return fuse_add_norm(gather_before_add(fuse_linear_add(program)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("rewrite", [fuse_linear_add, fuse_add_norm, gather_before_add, everything])
def test_a_rewrite_keeps_the_bits(
    rewrite: Callable[[Program], Program], num_ranks: int, is_int8: bool, dtype: torch.dtype
) -> None:
    program = a_program(dtype, num_ranks=num_ranks, is_int8=is_int8)
    rewritten = rewrite(program)
    changes = num_ranks == 1 or rewrite is not fuse_linear_add
    assert (kinds(rewritten) != kinds(program)) == changes
    assert torch.equal(logits(rewritten), logits(program))


def test_sums_go_into_the_products_before_them_or_the_norms_behind_them() -> None:
    one, two = (a_program(torch.float32, num_ranks=ranks) for ranks in (1, 2))
    assert kinds(fuse_add_norm(fuse_linear_add(one))) == [
        *(Embed, Norm, Linear, Norm, Linear),
        *(Gather, Norm, Logits),
    ]
    assert kinds(fuse_add_norm(gather_before_add(two))) == [
        *(Embed, Norm, Linear, AllReduce, AddNorm, Linear, AllReduce),
        *(Gather, Gather, AddNorm, Logits),
    ]


def test_a_product_that_is_read_again_is_not_added_away() -> None:
    twice = [*SUM, *SUM]
    program = a_program(torch.float32, num_ranks=1, between=twice)
    assert fuse_linear_add(program) == program
    assert torch.equal(logits(everything(program)), logits(program))


def test_a_scaled_sum_is_left_alone() -> None:
    scaled: list[Op] = [Add(x="branch", to="residual", scale=0.3)]
    program = a_program(torch.float32, num_ranks=1, between=scaled)
    assert fuse_linear_add(program) == program
    assert fuse_add_norm(program) == program
    later = gather_before_add(program)
    assert later != program
    assert torch.equal(logits(later), logits(program))


def test_only_an_rms_norm_is_fused_with_a_sum() -> None:
    add = Add(x="branch", to="residual")
    norm = Norm(weight_C=torch.ones(C), eps=1e-5, x="residual", out="normed", kind="wide")
    assert fuse_add_norm((add, norm)) == (add, norm)
