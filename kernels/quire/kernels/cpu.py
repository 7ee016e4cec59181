"""The CPU backend: paged attention, KV write and the element-wise steps of a layer.

A row's result has the same bits whoever shares the batch, and however its prompt was cut into
chunks: as a decode, a chunk or part of the whole prompt. Three rules make it so.

1. Every row is computed by itself.
2. KV is taken in tiles of `TILE` tokens counted from token 0, the last one filled up with zeros,
   and the tiles' sums are added in order. What is masked adds exact zeros.
3. A matrix product has four rows or more. BLAS takes other paths below that, with another order
   of summation (MKL 2024, AVX2 and AVX-512: 1 to 3 rows differ, 4 to 256 agree bit for bit).

Inputs may be bfloat16; everything from the scores to the output is float32.
"""

import torch
from torch import Tensor

from quire.kernels import reference

# T tokens of the step, packed   B sequences   M blocks of the longest   H query heads
# K KV heads   G = H / K   D head size   Q queries of one chunk   A tiles   L tokens in a tile
# X = Q * G rows of one KV head

TILE = 128
"""Tokens of KV in one matrix product. The result depends on it in the last bits."""

_MIN_ROWS = 4
_SCORE_BYTES = 4 << 20
"""Scores kept at once. Prefill of 1024 tokens, 12:4 heads of 64, one EPYC core: 0.1 to 8 MiB make
no difference above the noise, 64 MiB costs 20 %."""


class CpuBackend:
    """`quire.kernels.backend.AttentionBackend` in pure PyTorch."""

    name = "cpu"

    def write_kv(
        self,
        k_TKD: Tensor,
        v_TKD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping_T: Tensor,
    ) -> None:
        k_cache.flatten(0, 1).index_copy_(0, slot_mapping_T, k_TKD)
        v_cache.flatten(0, 1).index_copy_(0, slot_mapping_T, v_TKD)

    def attend(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_tables_BM: Tensor,
        seq_lens_B: Tensor,
        query_starts_B1: Tensor,
        num_decodes: int,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
    ) -> Tensor:
        del num_decodes, max_query_len, max_seq_len  # decodes and chunks are one code path here
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        starts: list[int] = query_starts_B1.tolist()
        seq_lens: list[int] = seq_lens_B.tolist()
        for row, seq_len in enumerate(seq_lens):
            start, end = starts[row], starts[row + 1]
            if start == end:
                continue
            num_blocks = -(-seq_len // k_cache.shape[1])
            blocks = block_tables_BM[row, :num_blocks]
            _attend_row(
                q_THD[start:end],
                _gather_tiles(k_cache, blocks, seq_len),
                _gather_tiles(v_cache, blocks, seq_len),
                out_THD[start:end],
                seq_len=seq_len,
                scale=scale,
            )
        return out_THD

    def rms_norm(
        self, x_TC: Tensor, weight_C: Tensor, *, eps: float, residual_TC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return reference.rms_norm(x_TC, weight_C, eps=eps, residual_TC=residual_TC)

    def rotary_embedding(self, x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        return reference.rotary_embedding(x_THD, cos_TR, sin_TR)

    def silu_and_mul(self, gate_up_TG: Tensor) -> Tensor:
        return reference.silu_and_mul(gate_up_TG)


def _gather_tiles(cache: Tensor, blocks_M: Tensor, seq_len: int) -> Tensor:
    """A sequence's tokens as float32 ``[A, K, TILE, D]``, zero past its end.

    The zeros matter: a masked score becomes a weight of 0, and 0 times the NaN that an unused
    slot may hold would still be NaN.
    """
    num_kv_heads, head_size = cache.shape[2:]
    pages = cache.flatten(1).index_select(0, blocks_M)
    tokens_NKD = pages.view(-1, num_kv_heads, head_size)
    full, tail = divmod(seq_len, TILE)
    tiles = torch.empty(full + (tail > 0), num_kv_heads, TILE, head_size, dtype=torch.float32)
    whole = tokens_NKD[: full * TILE].view(full, TILE, num_kv_heads, head_size)
    tiles[:full].copy_(whole.transpose(1, 2))
    if tail:
        tiles[full, :, :tail].copy_(tokens_NKD[full * TILE : seq_len].transpose(0, 1))
        tiles[full, :, tail:].zero_()
    return tiles


def _attend_row(
    q_QHD: Tensor,
    k_AKLD: Tensor,
    v_AKLD: Tensor,
    out_QHD: Tensor,
    *,
    seq_len: int,
    scale: float,
) -> None:
    """One sequence: its queries in chunks whose scores stay within `_SCORE_BYTES`."""
    num_queries, num_heads, head_size = q_QHD.shape
    num_kv_heads = k_AKLD.shape[1]
    group = num_heads // num_kv_heads
    context = seq_len - num_queries
    q_QKGD = (q_QHD.float() * scale).view(num_queries, num_kv_heads, group, head_size)
    score_bytes = 4 * num_heads * len(k_AKLD) * TILE
    step = max(16, _SCORE_BYTES // score_bytes)
    for first in range(0, num_queries, step):
        chunk = q_QKGD[first : first + step]
        missing = -(-_MIN_ROWS // group) - len(chunk)
        if missing > 0:
            chunk = torch.cat([chunk, chunk[-1:].expand(missing, -1, -1, -1)])
        q_KXD = chunk.permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_size)
        num_real = min(step, num_queries - first)
        end = context + first + num_real
        num_tiles = -(-end // TILE)
        out_KXD = _attend_chunk(
            q_KXD, k_AKLD[:num_tiles], v_AKLD[:num_tiles], context + first, group=group, end=end
        )
        out = out_KXD.view(num_kv_heads, -1, group, head_size).transpose(0, 1)[:num_real]
        out_QHD[first : first + num_real] = out.reshape(num_real, num_heads, head_size)


def _attend_chunk(
    q_KXD: Tensor, k_AKLD: Tensor, v_AKLD: Tensor, position: int, *, group: int, end: int
) -> Tensor:
    """Attention of consecutive queries, the first at ``position``, over the tokens before ``end``.

    ``X`` counts (query, head of the group) pairs.
    """
    num_tiles, num_kv_heads, _, head_size = k_AKLD.shape
    rows = q_KXD.shape[1]
    q = q_KXD.expand(num_tiles, -1, -1, -1).reshape(-1, rows, head_size)
    scores = torch.bmm(q, k_AKLD.flatten(0, 1).transpose(1, 2))
    scores_AKXL = scores.view(num_tiles, num_kv_heads, rows, TILE)

    # Only tiles from the first query's own on hold a token that some query must not see. Rows
    # that were added to reach `_MIN_ROWS` see what the last real query sees.
    first_tile = position // TILE
    tokens_AL = torch.arange(first_tile * TILE, num_tiles * TILE).view(-1, 1, 1, TILE)
    positions_X = (position + torch.arange(rows) // group).clamp_(max=end - 1)
    hidden = tokens_AL > positions_X.view(-1, 1)
    scores_AKXL[first_tile:].masked_fill_(hidden, float("-inf"))

    # Not exp2, fast as it is: its bits depend on where threads split the tensor.
    weights_AKXL = scores_AKXL.sub_(scores_AKXL.amax(dim=(0, 3)).unsqueeze(-1)).exp_()
    sums_AKX = weights_AKXL.sum(-1)
    parts = torch.bmm(weights_AKXL.view(-1, rows, TILE), v_AKLD.flatten(0, 1))
    parts_AKXD = parts.view(num_tiles, num_kv_heads, rows, head_size)
    for tile in range(1, num_tiles):  # in order: `sum(0)` groups its terms by their number
        parts_AKXD[0] += parts_AKXD[tile]
        sums_AKX[0] += sums_AKX[tile]
    return parts_AKXD[0] / sums_AKX[0].unsqueeze(-1)
