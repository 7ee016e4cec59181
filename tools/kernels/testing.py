"""Random paged batches for the tests and benchmarks of the kernels.

Rows are ragged and their blocks shuffled. Every unused slot holds NaN, and so does all of block 0,
with which block tables are padded.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import Rows
from quire.kernels.grouped import GroupedWeight
from quire.kernels.quantization import SCALE_BYTES
from quire.kernels.reference import paged as twins
from quire.kernels.shared_prefix import SharedSplits, find_shared

_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.int64: 0}
"""A few roundings of the dtype, for results of magnitude 1; integers must be equal."""


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """One step's attention inputs, and each row's K and V as dense tensors."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    rows: list[tuple[int, int]]
    """(tokens, queries) of each row."""
    dense_kv: list[tuple[Tensor, Tensor]]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    @property
    def query_starts(self) -> list[int]:
        starts = [0]
        for _, num_queries in self.rows:
            starts.append(starts[-1] + num_queries)
        return starts

    def step_rows(self, *, num_decodes: int = 0, shared: SharedSplits | None = None) -> Rows:
        return Rows(
            **self.tables(),
            num_decodes=num_decodes,
            max_query_len=max((queries for _, queries in self.rows), default=0),
            max_seq_len=max((tokens for tokens, _ in self.rows), default=0),
            shared=shared,
        )

    def tables(self) -> dict[str, Any]:
        return {
            "block_tables_BM": self.block_tables,
            "seq_lens_B": self._ints([tokens for tokens, _ in self.rows]),
            "query_starts_B1": self._ints(self.query_starts),
        }

    def attend(
        self,
        backend: AttentionBackend,
        *,
        num_decodes: int = 0,
        options: AttentionOptions = PLAIN,
        shared: SharedSplits | None = None,
    ) -> Tensor:
        """The backend's result."""
        return self.call(backend, num_decodes=num_decodes, options=options, shared=shared)()

    def call(
        self,
        backend: AttentionBackend,
        *,
        num_decodes: int = 0,
        options: AttentionOptions = PLAIN,
        shared: SharedSplits | None = None,
    ) -> Callable[[], Tensor]:
        """`attend` as a function, with tables on the device already, as in an engine's layers."""
        rows = self.step_rows(num_decodes=num_decodes, shared=shared)
        return lambda: backend.attend(
            self.q, self.k_cache, self.v_cache, rows, scale=self.scale, options=options
        )

    def expected(self, *, options: AttentionOptions = PLAIN) -> Tensor:
        """The twin's result."""
        return twins.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            **self.tables(),
            scale=self.scale,
            options=options,
        )

    def stored_by(
        self, backend: AttentionBackend | ModuleType, *, int8: bool = False
    ) -> "PagedBatch":
        """The batch with caches in the layout of this backend or of the twin's module, optionally
        in int8. Unused slots are NaN."""
        if int8:
            shape = (*self.k_cache.shape[:3], self.k_cache.shape[3] + SCALE_BYTES)
            # Read as scales, these bytes are NaN.
            k_cache = torch.full(shape, -1, dtype=torch.int8, device=self.k_cache.device)
        else:
            k_cache = torch.full_like(self.k_cache, float("nan"))
        v_cache = k_cache.clone()
        block_size = k_cache.shape[1]
        for (tokens, _), (k, v), blocks in zip(
            self.rows, self.dense_kv, self.block_tables, strict=True
        ):
            if not tokens:
                continue
            token = torch.arange(tokens, device=blocks.device)
            slots = blocks[token // block_size].long() * block_size + token % block_size
            backend.write_kv(k, v, k_cache, v_cache, slots)
        return replace(self, k_cache=k_cache, v_cache=v_cache)

    def with_shared_prefix(self, first: int, other: int, num_blocks: int) -> "PagedBatch":
        """A batch in which row ``other`` shares the first blocks of row ``first``."""
        tables, dense = self.block_tables.clone(), list(self.dense_kv)
        tables[other, :num_blocks] = tables[first, :num_blocks]
        shared = num_blocks * self.k_cache.shape[1]
        k, v = (
            torch.cat([theirs[:shared], own[shared:]])
            for theirs, own in zip(dense[first], dense[other], strict=True)
        )
        dense[other] = (k, v)
        return replace(self, block_tables=tables, dense_kv=dense)

    def only(self, row: int) -> "PagedBatch":
        """A batch with this row alone."""
        return self.cut(row, 0, self.rows[row][1])

    def cut(self, row: int, first: int, end: int) -> "PagedBatch":
        """A batch with queries ``first`` to ``end`` of this row alone, as a chunk."""
        tokens, queries = self.rows[row]
        start = self.query_starts[row]
        num_tokens = tokens - queries + end
        k, v = self.dense_kv[row]
        return replace(
            self,
            q=self.q[start + first : start + end],
            block_tables=self.block_tables[row : row + 1],
            rows=[(num_tokens, end - first)],
            dense_kv=[(k[:num_tokens], v[:num_tokens])],
        )

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.q.device)


def assert_near_twin(actual: Tensor, expected: Tensor) -> None:
    """Checks a kernel's result against its twin's, to a few roundings of the dtype.

    Raises:
        AssertionError: Shape, dtype or values differ; the message says where and by how much.
    """
    tolerance = _TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def shared_splits(batch: PagedBatch, *, num_decodes: int) -> SharedSplits | None:
    """The shared splits of the batch's decodes, however little they save."""
    num_heads, num_kv_heads = batch.q.shape[1], batch.k_cache.shape[2]
    lens = np.array([tokens for tokens, _ in batch.rows[:num_decodes]], np.int32)
    found = find_shared(
        batch.block_tables[:num_decodes].cpu().numpy(),
        lens,
        block_size=batch.k_cache.shape[1],
        group=num_heads // num_kv_heads,
        min_saved_tokens=1,
    )
    if found is None:
        return None
    device = batch.q.device
    return SharedSplits(
        num_splits_B=torch.from_numpy(found.num_splits_B).to(device),
        rows_XR=torch.from_numpy(found.rows_XR).to(device),
        splits_X=torch.from_numpy(found.splits_X).to(device),
    )


def paged_batch(
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PagedBatch:
    """A batch with these (tokens, queries) rows, identical at every call."""
    rng = torch.Generator(device).manual_seed(0)
    counts = [-(-tokens // block_size) for tokens, _ in rows]
    free = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables = torch.zeros(len(rows), max([*counts, 1]), dtype=torch.int32, device=device)
    shape = (sum(counts) + 1, block_size, num_kv_heads, head_size)
    k_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
    v_cache = k_cache.clone()
    dense_kv = []
    for row, (tokens, _) in enumerate(rows):
        blocks = torch.tensor([free.pop() for _ in range(counts[row])], dtype=torch.int64)
        tables[row, : counts[row]] = blocks
        positions = torch.arange(tokens)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        kv_shape = (2, tokens, num_kv_heads, head_size)
        k, v = torch.randn(kv_shape, generator=rng, device=device).to(dtype)
        k_cache.flatten(0, 1)[slots.to(device)] = k
        v_cache.flatten(0, 1)[slots.to(device)] = v
        dense_kv.append((k, v))
    q_shape = (sum(queries for _, queries in rows), num_heads, head_size)
    return PagedBatch(
        q=torch.randn(q_shape, generator=rng, device=device).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        rows=list(rows),
        dense_kv=dense_kv,
    )


def adjustments(
    num_rows: int, vocab_size: int, *, num_pairs: int, num_masks: int = 2
) -> dict[str, Tensor]:
    """Arguments of `reference_sampling.adjust_logits`: ``num_pairs`` biased pairs, bans among them,
    the same number of seen pairs, and masks for the first rows."""
    generator = torch.Generator().manual_seed(num_pairs)

    def cells() -> Tensor:
        return torch.randperm(num_rows * vocab_size, generator=generator)[:num_pairs]

    biased, seen = cells(), cells()
    bias = (biased % 7 - 3).float()
    return {
        "biased_rows_A": (biased // vocab_size).int(),
        "biased_ids_A": (biased % vocab_size).int(),
        "bias_A": bias.masked_fill_(biased % 5 == 0, float("-inf")),
        "seen_rows_E": (seen // vocab_size).int(),
        "seen_ids_E": (seen % vocab_size).int(),
        "seen_counts_E": (seen % 4).int(),
        "presence_S": torch.linspace(-1, 1, num_rows),
        "frequency_S": torch.linspace(0, 0.7, num_rows),
        "repetition_S": torch.linspace(0.7, 1.4, num_rows),
        "masked_rows_K": torch.arange(num_masks, dtype=torch.int32),
        "mask_KW": torch.randint(
            *(-(2**31), 2**31, (num_masks, -(-vocab_size // 32))),
            dtype=torch.int32,
            generator=generator,
        ),
    }


def grouped_weight(
    num_out: int, num_in: int, *, group: int, has_zeros: bool, dtype: torch.dtype
) -> GroupedWeight:
    """4-bit weights, identical at every call."""
    generator = torch.Generator().manual_seed(num_in)
    scale_OG = torch.rand(num_out, num_in // group, generator=generator) / num_in**0.5
    code_OI = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8, generator=generator)
    zero_OG = torch.randint(0, 17, scale_OG.shape, dtype=torch.uint8, generator=generator)
    return GroupedWeight(
        code_OI=code_OI,
        scale_OG=scale_OG,
        zero_OG=zero_OG if has_zeros else None,
        dtype=dtype,
    )
