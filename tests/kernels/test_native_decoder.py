"""The forward pass in one call, against the same pass layer by layer in plain PyTorch."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import AttentionBackend
from quire.kernels.cpu import CpuBackend
from quire.kernels.decoder import (
    Batch,
    Decoder,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    KvCache,
)
from quire.kernels.native_backend import NativeBackend
from quire.kernels.quantization import SCALE_BYTES

C, H, K, D, F, V, LAYERS, BLOCK = 72, 6, 2, 16, 56, 101, 2, 4
DTYPES = [torch.float32, torch.bfloat16]


def _shape(*, is_shared: bool = False) -> DecoderShape:
    angles = torch.outer(torch.arange(64.0), 100 ** -torch.linspace(0, 1, D // 2))
    return DecoderShape(
        num_heads=H,
        num_kv_heads=K,
        head_size=D,
        eps=1e-5,
        cos_PR=angles.cos(),
        sin_PR=angles.sin(),
        is_shared=is_shared,
    )


def _weights(backend: AttentionBackend, dtype: torch.dtype) -> DecoderWeights:
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).div(shape[-1] ** 0.5).to(dtype)

    layers = tuple(
        DecoderLayer(
            attention_norm_C=random(C) + 1,
            qkv=backend.pack_linear(random((H + 2 * K) * D, C), random((H + 2 * K) * D)),
            o=backend.pack_linear(random(C, H * D), random(C), num_parts=2),
            mlp_norm_C=random(C) + 1,
            gate_up=backend.pack_gated_linear(random(2 * F, C), random(2 * F)),
            down=backend.pack_linear(random(C, F), None, num_parts=4),
        )
        for _ in range(LAYERS)
    )
    return DecoderWeights(
        embedding_VC=random(V, C),
        layers=layers,
        norm_C=random(C) + 1,
        lm_head=backend.pack_linear(random(V, C)),
    )


def _kv(dtype: torch.dtype, *, int8: bool = False) -> KvCache:
    def cache() -> Tensor:
        if int8:  # these bytes are NaN as scales
            return torch.full((12, BLOCK, K, D + SCALE_BYTES), -1, dtype=torch.int8)
        return torch.full((12, BLOCK, K, D), float("nan"), dtype=dtype)

    return [(cache(), cache()) for _ in range(LAYERS)]


def _native(library: ctypes.CDLL, *, int8: bool) -> NativeBackend:
    return NativeBackend(library, quantization="int8" if int8 else None)


def _batch(rows: list[tuple[list[int], int, list[int]]]) -> Batch:
    """Of rows (all tokens so far, how many of them are computed, blocks)."""
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


def _decoder(backend: AttentionBackend, dtype: torch.dtype, *, is_shared: bool = False) -> Decoder:
    decoder = backend.decoder(_weights(backend, dtype), _shape(is_shared=is_shared))
    assert decoder is not None
    return decoder


def _layer_by_layer(
    backend: AttentionBackend, dtype: torch.dtype, batch: Batch, kv: KvCache
) -> Tensor:
    """What a decoder does, from the parts of a backend."""
    weights, shape = _weights(backend, dtype), _shape()
    cos, sin = shape.cos_PR[batch.positions_T], shape.sin_PR[batch.positions_T]
    x, residual = weights.embedding_VC[batch.token_ids_T], None
    for layer, (k_cache, v_cache) in zip(weights.layers, kv, strict=True):
        x, residual = backend.rms_norm(
            x, layer.attention_norm_C, eps=shape.eps, residual_TC=residual
        )
        qkv = layer.qkv(x).view(len(x), H + 2 * K, D)
        qk = backend.rotary_embedding(qkv[:, : H + K], cos, sin)
        backend.write_kv(qk[:, H:], qkv[:, H + K :], k_cache, v_cache, batch.slot_mapping_T)
        out = backend.attend(
            qk[:, :H],
            k_cache,
            v_cache,
            block_tables_BM=batch.block_tables_BM,
            seq_lens_B=batch.seq_lens_B,
            query_starts_B1=batch.query_starts_B1,
            num_decodes=0,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=shape.scale,
        )
        x, residual = backend.rms_norm(
            layer.o(out.flatten(1)), layer.mlp_norm_C, eps=shape.eps, residual_TC=residual
        )
        x = layer.down(layer.gate_up(x))
    x, _ = backend.rms_norm(x, weights.norm_C, eps=shape.eps, residual_TC=residual)
    return weights.lm_head(x[batch.last_tokens_S]).float()


def _same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_logits_are_those_of_plain_pytorch(
    library: ctypes.CDLL, dtype: torch.dtype, int8: bool
) -> None:
    decoder = _decoder(_native(library, int8=int8), dtype)
    kv, plain_kv = _kv(dtype, int8=int8), _kv(dtype, int8=int8)
    plain = CpuBackend(quantization="int8" if int8 else None)
    for batch in (FIRST, SECOND):
        logits = decoder.forward(batch, kv, all_reduce=_same)
        expected = _layer_by_layer(plain, dtype, batch, plain_kv)
        # A last bit may round another 127th.
        tolerance = 0.12 if int8 else {torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_one_call_gives_the_bits_of_many(
    library: ctypes.CDLL, int8: bool, dtype: torch.dtype, threads: int
) -> None:
    backend = _native(library, int8=int8)
    kv, parts_kv = _kv(dtype, int8=int8), _kv(dtype, int8=int8)
    decoder = _decoder(backend, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for batch in (FIRST, SECOND):
            logits = decoder.forward(batch, kv, all_reduce=_same)
            parts = _layer_by_layer(backend, dtype, batch, parts_kv)
            torch.testing.assert_close(logits.to(dtype), parts.to(dtype), atol=0, rtol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_phase_by_phase_gives_the_bits_of_one_call(
    library: ctypes.CDLL, dtype: torch.dtype, int8: bool
) -> None:
    backend, sums = _native(library, int8=int8), 0

    def all_reduce(x: Tensor) -> Tensor:
        nonlocal sums
        sums += 1
        assert x.dtype == torch.float32
        return x

    kv, shared_kv = _kv(dtype, int8=int8), _kv(dtype, int8=int8)
    alone, shared = _decoder(backend, dtype), _decoder(backend, dtype, is_shared=True)
    for batch in (FIRST, SECOND):
        logits = alone.forward(batch, kv, all_reduce=_same)
        assert torch.equal(shared.forward(batch, shared_kv, all_reduce=all_reduce), logits)
    assert sums == 2 * 2 * LAYERS


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_greatest_logit_of_a_row_is_found_without_its_logits(
    library: ctypes.CDLL, dtype: torch.dtype, threads: int
) -> None:
    backend = NativeBackend(library)
    weights = _weights(backend, dtype)
    # Columns 0 to 56 again from 57 on: whatever is the greatest is there twice.
    rows = torch.randn(57, C, generator=torch.Generator().manual_seed(3)).to(dtype)
    weights = replace(weights, lm_head=backend.pack_linear(torch.cat([rows, rows])))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for is_shared in (False, True):
            decoder = backend.decoder(weights, _shape(is_shared=is_shared))
            assert decoder is not None
            logits = decoder.forward(FIRST, _kv(dtype), all_reduce=_same)
            for num_greedy in (1, 2):
                greatest = torch.full((num_greedy, 2), 7.0)
                rest = decoder.forward(FIRST, _kv(dtype), all_reduce=_same, greatest_G2=greatest)
                assert torch.equal(rest, logits[: 2 - num_greedy])
                row_logits = [row.tolist() for row in logits[2 - num_greedy :]]
                assert greatest.tolist() == [[max(row), row.index(max(row))] for row in row_logits]
    finally:
        torch.set_num_threads(before)


def test_a_row_of_nan_has_column_0_as_its_greatest(library: ctypes.CDLL) -> None:
    backend = NativeBackend(library)
    weights = _weights(backend, torch.float32)
    broken = replace(weights, norm_C=torch.full((C,), float("nan")))
    decoder = backend.decoder(broken, _shape())
    assert decoder is not None
    greatest = torch.full((2, 2), 7.0)
    decoder.forward(FIRST, _kv(torch.float32), all_reduce=_same, greatest_G2=greatest)
    assert greatest[:, 1].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: replace(b, token_ids_T=b.token_ids_T + V), "token id 200, must be below 101"),
        (lambda b: replace(b, positions_T=b.positions_T - 1), "position -1, must be below 64"),
        (lambda b: replace(b, slot_mapping_T=b.slot_mapping_T + 8), "slot 55, must be below 48"),
    ],
)
def test_a_wrong_index_is_refused(
    library: ctypes.CDLL, change: Callable[[Batch], Batch], message: str
) -> None:
    decoder = _decoder(NativeBackend(library), torch.float32)
    with pytest.raises(IndexError, match=message):
        decoder.forward(change(FIRST), _kv(torch.float32), all_reduce=_same)


def test_what_the_library_cannot_run_is_left_to_the_model(library: ctypes.CDLL) -> None:
    backend = NativeBackend(library)
    assert backend.decoder(_weights(backend, torch.float16), _shape()) is None
    weights = _weights(backend, torch.float32)
    assert backend.decoder(weights, replace(_shape(), head_size=8)) is None
