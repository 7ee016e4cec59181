"""The CPU backend: paged attention, KV write and the element-wise steps of a layer.

A row's result has the same bits in any batch and for any chunking of its prompt: as a decode, a
chunk or part of the whole prompt. Three rules ensure this.

1. Rows share a call but never a sum: they are the batch of a batched product.
2. KV is processed in tiles of `TILE` tokens counted from token 0, the last one padded with zeros,
   and the tiles' sums are added in order. Masked tokens add exact zeros.
3. A matrix product has 16 rows or more. Below that MKL uses other code paths, which sum in another
   order (up to 3 rows on one CPU with AVX-512, up to 10 on another). On Intel's CPUs this is also
   disabled (``MKL_CBWR=AUTO,STRICT``, unless the environment has another value).

Inputs may be bfloat16; everything from the scores to the output is float32.
"""

import os
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Rows
from quire.kernels.grouped import GroupedWeight, decoded, round_to_groups
from quire.kernels.loop import Loop
from quire.kernels.ops import GateActivation, LinearLayer, MixExperts, Program, ProgramRunner
from quire.kernels.quantization import Quantization
from quire.kernels.reference import layers as reference
from quire.kernels.rewrites import fuse_add_norm, gather_before_add
from quire.kernels.torch.experts import Router, multiply_one_by_one
from quire.kernels.torch.linear import PlainGatedLinear, PlainInt8Linear, PlainLinear, wide_linear
from quire.kernels.torch.low_rank import LowRankLayers, PlainLowRank

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   G = H / K   D head size   R rows computed together   A tiles   L tokens in a tile
# (of `rotate_and_write_kv`: A heads of Q, K and V together   R half of the rotated size)
# X = queries * G pairs of a query and a head of its group

_CPU_INFO = Path("/proc/cpuinfo")
if _CPU_INFO.exists() and "GenuineIntel" in _CPU_INFO.read_text(encoding="utf-8", errors="replace"):
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # MKL reads it at its first call.

TILE = 128
"""Tokens of KV in one matrix product. The result depends on it in the last bits."""

_MIN_PAIRS = 16
_MAX_TILES = 16
"""Tiles of decodes gathered at once, unless one row has more: calls into torch dominate short
contexts, and level-2 cache the long ones."""
_SCORE_BYTES = 4 << 20
"""Bytes of a prefill chunk's scores in memory at once."""


class CpuBackend:
    """`quire.kernels.backend.AttentionBackend` in pure PyTorch."""

    name = "cpu"

    def __init__(self, *, quantization: Quantization | None = None) -> None:
        """``quantization``: the format to which linear layers quantise; ``None`` for none."""
        self.quantization = quantization

    def is_head_major(self, dtype: torch.dtype, head_size: int) -> bool:
        return False

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
        del options  # of these, a write only uses the scales of a float8 cache
        if k_cache.dtype == torch.int8:
            k_TKD, v_TKD = reference.to_int8(k_TKD), reference.to_int8(v_TKD)
        k_cache.flatten(0, 1).index_copy_(0, slot_mapping_T, k_TKD)
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping_T, v_TKD)

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
        num_kv_heads = k_cache.shape[2]
        # Q and K lie side by side, so one call rotates both.
        qk_TAD = self.rotary_embedding(qkv_TAD[:, :-num_kv_heads], cos_TR, sin_TR)
        k_TKD, v_TKD = qk_TAD[:, -num_kv_heads:], qkv_TAD[:, -num_kv_heads:]
        self.write_kv(k_TKD, v_TKD, k_cache, v_cache, slot_mapping_T, options=options)
        return qk_TAD[:, :-num_kv_heads]

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
        # Decodes and chunks share a code path, and the CPU's caches serve blocks that rows share.
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        starts: list[int] = rows.query_starts_B1.tolist()
        seq_lens: list[int] = rows.seq_lens_B.tolist()
        per_tile, rest = divmod(TILE, k_cache.shape[1])
        assert rest == 0, f"block_size={k_cache.shape[1]}: must divide {TILE}"
        tables_BM = pad(rows.block_tables_BM, (0, -rows.block_tables_BM.shape[1] % per_tile))
        decodes: dict[int, list[int]] = {}
        for row, seq_len in enumerate(seq_lens):
            num_queries = starts[row + 1] - starts[row]
            if num_queries == 1 and seq_len == 0:
                out_THD[starts[row]].zero_()
            elif num_queries == 1:
                decodes.setdefault(-(-seq_len // TILE), []).append(row)
            elif num_queries:
                tiles = slice(-(-seq_len // TILE) * per_tile)
                _attend_queries(
                    q_THD[starts[row] : starts[row + 1]],
                    _gather_tiles(k_cache, tables_BM[row : row + 1, tiles], [seq_len]),
                    _gather_tiles(v_cache, tables_BM[row : row + 1, tiles], [seq_len]),
                    out_THD[starts[row] : starts[row + 1]],
                    seq_len=seq_len,
                    scale=scale,
                    options=options,
                )
        for num_tiles, alike in decodes.items():
            step = max(1, _MAX_TILES // num_tiles)
            for some in (alike[first : first + step] for first in range(0, len(alike), step)):
                tables_RM = tables_BM[some, : num_tiles * per_tile]
                lens = [seq_lens[row] for row in some]
                tokens = [starts[row] for row in some]
                out_THD[tokens] = _attend_decodes(
                    q_THD[tokens],
                    _gather_tiles(k_cache, tables_RM, lens),
                    _gather_tiles(v_cache, tables_RM, lens),
                    seq_lens=lens,
                    scale=scale,
                    options=options,
                ).to(q_THD.dtype)
        return out_THD

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return reference.rms_norm(x_TC, weight_C, eps=eps, residual_TC=residual_TC)

    def wide_norm(
        self,
        x_TC: Tensor,
        weight_C: Tensor,
        bias_C: Tensor | None,
        *,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        return reference.wide_norm(x_TC, weight_C, bias_C, eps=eps, is_centred=is_centred)

    def rotary_embedding(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        return reference.rotary_embedding(x_THD, cos_TR, sin_TR)

    def pack_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        num_parts: int = 1,
        is_lm_head: bool = False,
    ) -> LinearLayer:
        kind = self._kind(is_lm_head=is_lm_head)
        if kind == "w4" and isinstance(weight_OI, Tensor):
            weight_OI = round_to_groups(weight_OI, num_parts=num_parts) or weight_OI
        weight_OI = decoded(weight_OI)
        if kind == "int8":
            return PlainInt8Linear.of(weight_OI, bias_O, num_parts=num_parts)
        return PlainLinear(weight_OI, bias_O)

    def pack_gated_linear(
        self,
        weight_OI: Tensor | GroupedWeight,
        bias_O: Tensor | None = None,
        *,
        activation: GateActivation = "silu",
    ) -> LinearLayer:
        return PlainGatedLinear(self.pack_linear(weight_OI, bias_O), activation)

    def _kind(self, *, is_lm_head: bool) -> Quantization | None:
        """A layer's quantization: the LM head would lose too much in 4 bits."""
        return "int8" if self.quantization == "w4" and is_lm_head else self.quantization

    def pack_router(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> LinearLayer:
        return wide_linear(weight_OI, bias_O)

    def choose_experts(self, router: Router, score_TX: Tensor) -> tuple[Tensor, Tensor]:
        return router.choose(score_TX)

    def multiply_experts(self, op: MixExperts, x_TC: Tensor, experts_Tk: Tensor) -> Tensor:
        return multiply_one_by_one(op, x_TC, experts_Tk)

    def low_rank_layers(self, program: Program) -> LowRankLayers:
        return PlainLowRank(program)

    def prepare(self, program: Program) -> ProgramRunner:
        return Loop(self, fuse_add_norm(gather_before_add(program)))


def _gather_tiles(cache: Tensor, tables_RM: Tensor, seq_lens: list[int]) -> Tensor:
    """The rows' tokens as float32 ``[R, A, K, TILE, D]``, zero past each row's end.

    ``tables`` has the blocks of A whole tiles. The zeros are needed: a masked score becomes a
    weight of 0, and 0 times a NaN in an unused slot would be NaN.
    """
    pages = cache.flatten(1).index_select(0, tables_RM.flatten()).view(-1, *cache.shape[1:])
    if cache.dtype == torch.int8:
        pages = reference.from_int8(pages)
    num_kv_heads, head_size = pages.shape[2:]
    tokens = pages.view(len(seq_lens), -1, TILE, num_kv_heads, head_size).transpose(2, 3)
    tiles = torch.empty(tokens.shape, dtype=torch.float32).copy_(tokens)
    for row, seq_len in enumerate(seq_lens):
        if seq_len % TILE:
            tiles[row, -1, :, seq_len % TILE :].zero_()
    return tiles


def _attend_decodes(
    q_RHD: Tensor,
    k_RAKLD: Tensor,
    v_RAKLD: Tensor,
    *,
    seq_lens: list[int],
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """Attention of one query per row; all rows have the same number of tiles."""
    num_rows, num_heads, head_size = q_RHD.shape
    num_kv_heads = k_RAKLD.shape[2]
    group = num_heads // num_kv_heads
    q_RKGD = (q_RHD.float() * scale).view(num_rows, num_kv_heads, group, head_size)
    q_RKXD = pad(q_RKGD, (0, 0, 0, max(0, _MIN_PAIRS - group)))
    positions_RX = torch.tensor(seq_lens).sub_(1).view(-1, 1)
    out_RKXD = _attend(
        q_RKXD,
        k_RAKLD,
        v_RAKLD,
        positions_RX,
        last_token=None,
        first_tile=k_RAKLD.shape[1] - 1,
        group=group,
        options=options,
    )
    return out_RKXD[:, :, :group].reshape(q_RHD.shape)


def _attend_queries(
    q_QHD: Tensor,
    k_1AKLD: Tensor,
    v_1AKLD: Tensor,
    out_QHD: Tensor,
    *,
    seq_len: int,
    scale: float,
    options: AttentionOptions,
) -> None:
    """Attention of the last Q tokens of a row, in chunks with scores within `_SCORE_BYTES`."""
    num_queries, num_heads, head_size = q_QHD.shape
    num_kv_heads = k_1AKLD.shape[2]
    group = num_heads // num_kv_heads
    q_QKGD = (q_QHD.float() * scale).view(num_queries, num_kv_heads, group, head_size)
    step = max(16, _SCORE_BYTES // (4 * num_heads * k_1AKLD.shape[1] * TILE))
    for first in range(0, num_queries, step):
        chunk = q_QKGD[first : first + step]
        position = seq_len - num_queries + first
        end = min(seq_len, position + len(chunk) + options.lookahead)
        num_tiles = -(-end // TILE)
        q_KXD = chunk.permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_size)
        num_pairs = q_KXD.shape[1]
        q_1KXD = pad(q_KXD, (0, 0, 0, max(0, _MIN_PAIRS - num_pairs)))[None]
        positions_1X = position + torch.arange(q_1KXD.shape[2]) // group
        out_1KXD = _attend(
            q_1KXD,
            k_1AKLD[:, :num_tiles],
            v_1AKLD[:, :num_tiles],
            positions_1X.clamp_(max=position + len(chunk) - 1)[None],
            last_token=seq_len - 1,
            first_tile=position // TILE,
            group=group,
            options=options,
        )
        out = out_1KXD[0, :, :num_pairs].view(num_kv_heads, -1, group, head_size)
        out_QHD[first : first + step] = out.transpose(0, 1).reshape(-1, num_heads, head_size)


def _attend(
    q_RKXD: Tensor,
    k_RAKLD: Tensor,
    v_RAKLD: Tensor,
    positions_RX: Tensor,
    *,
    last_token: int | None,
    first_tile: int,
    group: int,
    options: AttentionOptions,
) -> Tensor:
    """Attention of (query, head) pairs at ``positions``, which lie in tile ``first_tile`` or later.

    Pair x is of head ``x % group`` of its group. ``positions`` is ``[R, 1]`` if a row's pairs share
    one position, the row's last token. ``q`` is scaled already.
    """
    num_rows, num_tiles, num_kv_heads, _, head_size = k_RAKLD.shape
    num_pairs = q_RKXD.shape[2]
    shape = (num_rows, num_tiles, num_kv_heads, num_pairs, -1)
    q = q_RKXD.unsqueeze(1).expand(*shape).reshape(-1, num_pairs, head_size)
    scores_RAKXL = torch.bmm(q, k_RAKLD.flatten(0, 2).transpose(1, 2)).view(*shape)
    window, cap = options.window, options.soft_cap
    if cap is not None:
        scores_RAKXL = scores_RAKXL.div_(cap).tanh_().mul_(cap)
    if window is not None:
        first_tile = 0
    tokens_AL = torch.arange(first_tile * TILE, num_tiles * TILE).view(-1, 1, 1, TILE)
    ends_RX = (
        positions_RX
        if last_token is None
        else (positions_RX + options.lookahead).clamp_(max=last_token)
    )
    hidden = tokens_AL > ends_RX[:, None, None, :, None]
    if window is not None:
        hidden |= tokens_AL <= positions_RX[:, None, None, :, None] - window
    scores_RAKXL[:, first_tile:].masked_fill_(hidden, float("-inf"))

    # exp2 would be faster, but its bits depend on where threads split the tensor.
    maxima_RKX = scores_RAKXL.amax(dim=(1, 4))
    sinks_KX = None
    if options.sinks is not None:
        sinks_KG = scores_RAKXL.new_tensor(options.sinks).view(num_kv_heads, group)
        sinks_KX = sinks_KG[:, torch.arange(num_pairs) % group]
        maxima_RKX = torch.maximum(maxima_RKX, sinks_KX)
    weights_RAKXL = scores_RAKXL.sub_(maxima_RKX[:, None, ..., None]).exp_()
    sums_RAKX = weights_RAKXL.sum(-1)
    parts = torch.bmm(weights_RAKXL.view(-1, num_pairs, TILE), v_RAKLD.flatten(0, 2))
    parts_RAKXD = parts.view(*shape)
    sum_RKXD, sum_RKX = parts_RAKXD[:, 0], sums_RAKX[:, 0]
    for tile in range(1, num_tiles):  # in order: `sum(1)` groups its terms by their number
        sum_RKXD += parts_RAKXD[:, tile]
        sum_RKX += sums_RAKX[:, tile]
    if sinks_KX is not None:
        sum_RKX += sinks_KX.sub(maxima_RKX).exp_()
    return sum_RKXD / sum_RKX.unsqueeze(-1)
