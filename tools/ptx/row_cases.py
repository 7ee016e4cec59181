"""The cases of all kernels except attention; see `tools.ptx.cases`."""

from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
from tools.kernels.ranks import LocalRanks, RanksAtOnce
from tools.kernels.testing import adjustments, assert_near_twin, grouped_weight
from tools.ptx.cases import BACKEND, Case, Emulate
from torch import Tensor

from quire.kernels.ops import Embed, Linear, LowRank
from quire.kernels.reference import layers as reference
from quire.kernels.reference import paged as twins
from quire.kernels.reference import sampling as reference_sampling
from quire.kernels.torch.linear import PlainLinear
from quire.kernels.torch.low_rank import LowRankLayers, PlainLowRank
from quire.kernels.triton import logits as triton_logits
from quire.kernels.triton import sample as triton_sample
from quire.kernels.triton.elementwise import silu_and_mul
from quire.kernels.triton.experts import (
    ExpertWeights,
    SortedPairs,
    multiply_down,
    multiply_up,
)
from quire.kernels.triton.grouped import GroupedLinear
from quire.kernels.triton.launch import ALL_REDUCE_BLOCK, SAMPLE_BLOCK
from quire.kernels.triton.low_rank import TritonLowRank


def row_cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype)[6:]
        for channels, is_quick in ((1000, True), (4096, False)):
            yield Case(
                name=f"rms_norm {channels} {name}",
                kernels=("rms_norm_kernel",),
                check=partial(check_norm, channels=channels, dtype=dtype),
                is_quick=is_quick,
            )
        yield Case(
            name=f"wide_norm {name}",
            kernels=("wide_norm_kernel",),
            check=partial(check_wide_norm, dtype=dtype),
        )
        yield Case(
            name=f"silu_and_mul {name}",
            kernels=("silu_and_mul_kernel",),
            check=partial(check_silu, dtype=dtype),
        )
        yield Case(
            name=f"rotary {name}",
            kernels=("rotary_kernel",),
            check=partial(check_rotary, dtype=dtype),
        )
        yield Case(
            name=f"experts {name}",
            kernels=("experts_kernel",),
            check=partial(check_experts, dtype=dtype),
        )
        yield Case(
            name=f"low_rank {name}",
            kernels=("shrink_kernel", "expand_kernel"),
            check=partial(check_low_rank, dtype=dtype),
        )
        yield Case(
            name=f"w4 {name}",
            kernels=("grouped_kernel",),
            check=partial(check_grouped, dtype=dtype),
        )
        for num_ranks in (2, 4, 8):
            yield Case(
                name=f"all_reduce {num_ranks} ranks {name}",
                kernels=("all_reduce_kernel",),
                check=partial(check_all_reduce, num_ranks=num_ranks, dtype=dtype),
                is_quick=dtype == torch.bfloat16,
            )
            yield Case(
                name=f"all_reduce two shots {num_ranks} ranks {name}",
                kernels=("all_reduce_two_shot_kernel",),
                check=partial(check_two_shots, num_ranks=num_ranks, dtype=dtype),
                is_quick=dtype == torch.bfloat16,
            )
    kernels = ("bias_kernel", "adjust_kernel", "mask_kernel")
    yield Case(name="adjust", kernels=kernels, check=check_adjust)
    for vocab_size in (300, SAMPLE_BLOCK + 5):
        yield Case(
            name=f"sample {vocab_size}",
            kernels=("sample_kernel",),
            check=partial(check_sample, vocab_size=vocab_size),
        )
    yield Case(
        name="sample 5000 in 3 parts",
        kernels=("sample_kernel",),
        check=partial(check_sample, vocab_size=5000, num_parts=3),
    )


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check_norm(emulate: Emulate, *, channels: int, dtype: torch.dtype) -> None:
    x, residual = _randn(2, 5, channels, dtype=dtype)
    weight = _randn(channels, dtype=dtype)
    with emulate():
        got, got_sum = BACKEND.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
        plain, _ = BACKEND.rms_norm(x, weight, eps=1e-5)
    want, want_sum = reference.rms_norm(x, weight, eps=1e-5, residual_TC=residual)
    assert_near_twin(got, want)
    assert torch.equal(got_sum, want_sum)
    assert_near_twin(plain, reference.rms_norm(x, weight, eps=1e-5)[0])


def check_wide_norm(emulate: Emulate, *, dtype: torch.dtype) -> None:
    x = _randn(5, 1000, dtype=dtype)
    weight, bias = _randn(2, 1000)
    for bias_C, is_centred in ((bias, True), (None, False)):
        with emulate():
            got = BACKEND.wide_norm(x, weight, bias_C, eps=1e-5, is_centred=is_centred)
        want = reference.wide_norm(x, weight, bias_C, eps=1e-5, is_centred=is_centred)
        assert_near_twin(got, want)


def check_silu(emulate: Emulate, *, dtype: torch.dtype) -> None:
    gate_up = _randn(3, 2 * 1032, dtype=dtype) * 4
    with emulate():
        got = silu_and_mul(gate_up)
    assert_near_twin(got, reference.silu_and_mul(gate_up))


def check_rotary(emulate: Emulate, *, dtype: torch.dtype) -> None:
    """Together with the write of K and V, which leaves all other slots alone."""
    qkv, angles = _randn(7, 12, 128, dtype=dtype), _randn(7, 64)
    turns = (angles.cos(), angles.sin())
    slots = torch.tensor([31, 0, 9, 8, 17, 63, 40])
    got, want = torch.full((2, 2, 4, 16, 2, 128), 7.0).to(dtype)
    with emulate():
        q = BACKEND.rotate_and_write_kv(qkv, *turns, got[0], got[1], slots)
    assert_near_twin(q, twins.rotate_and_write_kv(qkv, *turns, want[0], want[1], slots))
    assert_near_twin(got, want)
    assert torch.equal(got == 7.0, want == 7.0)


def check_experts(emulate: Emulate, *, dtype: torch.dtype) -> None:
    """Rows of no, one and more than one tile; a token alone has the bits that it has in a batch."""
    experts_Tk = torch.tensor([[0, 3]] * 66 + [[3, 1]])
    for num_in, num_out in ((80, 72), (33, 64)):
        weights = _randn(5, num_out, num_in, dtype=dtype)
        biases = _randn(5, num_out, dtype=dtype)
        products = ExpertWeights.of(tuple(weights), tuple(biases))
        x = _randn(len(experts_Tk), num_in, dtype=dtype)
        pairs = SortedPairs.of(experts_Tk, num_experts=5)
        alone = SortedPairs.of(experts_Tk[-1:], num_experts=5)
        with emulate(memory=(*products.weight_OIs, *(products.bias_Os or ()))):
            up = multiply_up(x, products, pairs)
            down = multiply_down(x[:, None].expand(-1, 2, -1).flatten(0, 1), products, pairs)
            up_alone = multiply_up(x[-1:], products, alone)
        order = pairs.order_N.long()
        expert_N, rows_N = experts_Tk.flatten()[order], order // 2
        want = torch.einsum("ni,noi->no", x[rows_N].float(), weights[expert_N].float())
        want += biases[expert_N].float()
        assert_near_twin(up, want.to(dtype))
        in_order = x.repeat_interleave(2, 0).float()
        want = torch.einsum("ni,noi->no", in_order, weights[expert_N].float())
        want += biases[expert_N].float()
        assert_near_twin(down[order], want)
        assert torch.equal(up_alone, up[rows_N == len(x) - 1])


def check_low_rank(emulate: Emulate, *, dtype: torch.dtype) -> None:
    """An adapter of more than one tile of tokens and one of few, and parts that end within a tile
    of outputs and within a step of ranks; a token alone has the bits that it has in a batch, and
    those without an adapter keep theirs."""
    layer = PlainLinear(_randn(100, 144, dtype=dtype))
    program = (
        Embed(weight_VC=layer.weight_OI[:1], out="residual"),
        Linear(name="qkv", layer=layer, x="normed", out="qkv"),
    )
    plain, low_rank = PlainLowRank(program), TritonLowRank(program)
    for each in (plain, low_rank):
        each.open(num_slots=3, max_rank=24)
        for slot, rank in ((0, 24), (2, 5)):
            parts = [
                LowRank(
                    a_RI=_randn(rank + number, 144, dtype=dtype) / 12,
                    b_OR=_randn(height, rank + number, dtype=dtype) / 5,
                    first_row=first,
                    scale=0.5 + number,
                )
                for number, (first, height) in enumerate(((0, 70), (70, 7)))
                if rank + number <= 24
            ]
            each.set(slot, {"qkv": tuple(parts)})
    slots = torch.tensor([0, -1, 2, 0] * 5 + [0] * 7 + [1, 2]).int()
    x = _randn(len(slots), 144, dtype=dtype)
    product = layer(x)
    with emulate():
        got = _with_low_rank(low_rank, x, product, slots)
        alone = _with_low_rank(low_rank, x[-1:], product[-1:], slots[-1:])
    assert_near_twin(got, _with_low_rank(plain, x, product, slots).to(dtype))
    assert torch.equal(alone, got[-1:])
    is_plain = slots.eq(-1) | slots.eq(1)
    assert torch.equal(got[is_plain], product[is_plain])


def _with_low_rank(low_rank: LowRankLayers, x: Tensor, product: Tensor, slots: Tensor) -> Tensor:
    groups = low_rank.group(slots)
    ax = low_rank.shrink("qkv", x, groups)
    assert ax is not None
    return low_rank.expand("qkv", product.clone(), ax, groups)


def check_grouped(emulate: Emulate, *, dtype: torch.dtype) -> None:
    """Half a step of inputs at the end, a tile of outputs and some, with zeros and without; a row
    alone has the bits that it has beside others."""
    for num_in, group, has_zeros in ((160, 32, False), (72, 8, True)):
        weight = grouped_weight(40, num_in, group=group, has_zeros=has_zeros, dtype=dtype)
        bias = _randn(40, dtype=dtype) if has_zeros else None
        x = _randn(66, num_in, dtype=dtype)
        layer = GroupedLinear.of(weight, bias)
        with emulate():
            got, alone = layer(x), layer(x[-1:])
        want = x.float() @ weight.decode().float().T
        assert_near_twin(got, (want if bias is None else want + bias.float()).to(dtype))
        assert torch.equal(alone, got[-1:])


def check_all_reduce(emulate: Emulate, *, num_ranks: int, dtype: torch.dtype) -> None:
    """The sum in the order of the ranks, to the bit, in two meetings."""
    for rank in (0, num_ranks - 1):
        ranks = LocalRanks(num_ranks, dtype)
        for num_values in (ALL_REDUCE_BLOCK + 8, 16):
            inputs = list(_randn(num_ranks, num_values, dtype=dtype))
            with emulate(memory=(ranks.buffers, ranks.flags)):
                got = ranks.reduce_alone(rank, inputs)
            want = inputs[0].float()
            for x in inputs[1:]:
                want = want + x.float()
            assert torch.equal(got, want.to(dtype))


def check_two_shots(emulate: Emulate, *, num_ranks: int, dtype: torch.dtype) -> None:
    """All ranks at once, each program with one block and with two: the sum in the order of the
    ranks, which is what one shot gives, to the bit."""
    ranks = RanksAtOnce(num_ranks, dtype, num_programs=2)
    for num_values in (ALL_REDUCE_BLOCK * num_ranks * 3 + 8, 16):
        got = _randn(num_ranks, num_values, dtype=dtype)
        want = got[0].float()
        for x in got[1:]:
            want = want + x.float()
        with emulate(memory=(ranks.buffers, ranks.flags)):
            ranks.all_reduce(got)
        for x in got:
            assert torch.equal(x, want.to(dtype))


def check_adjust(emulate: Emulate) -> None:
    logits = _randn(4, 3001)
    arguments = adjustments(4, 3001, num_pairs=2000)
    got = logits.clone()
    with emulate():
        triton_logits.adjust_logits(got, **arguments)
    reference_sampling.adjust_logits(logits, **arguments)
    assert torch.equal(got, logits)


def check_sample(emulate: Emulate, *, vocab_size: int, num_parts: int = 1) -> None:
    """Greedy rows, rows without limits, and each limit alone and together, with ties.

    The programs of a row wait for each other, so that all have to run at once: see `MAX_LANES`.
    """
    num_rows = 12 if num_parts == 1 else 8
    row = torch.arange(num_rows)
    logits = (_randn(num_rows, vocab_size) * 12).round() / 4
    parameters = {
        "temperature_S": (row % 4) * 0.5,
        "top_k_S": torch.tensor([0, 50, 3] * 4)[:num_rows].int(),
        "top_p_S": torch.tensor([1.0, 0.9, 0.7003, 1e-6] * 3)[:num_rows],
        "min_p_S": torch.tensor([0.0, 0.0, 0.05] * 4)[:num_rows],
        "seed_S": row * 977,
        "position_S": row * 31,
    }
    in_parts = mock.patch.object(triton_sample, "parts_of_a_row", return_value=num_parts)
    with in_parts, emulate():
        got = triton_sample.sample(logits, **parameters)
    assert got.tolist() == reference_sampling.sample(logits, **parameters).tolist()
