"""A Llama's forward pass in one call of the native library, or one call between all-reduces."""

import ctypes
from collections.abc import Callable
from ctypes import byref

import torch
from torch import Tensor

from quire.kernels import native_abi
from quire.kernels.decoder import Batch, DecoderLayer, DecoderShape, DecoderWeights, KvCache
from quire.kernels.native_int8 import Int8Linear
from quire.kernels.native_linear import NativeLinear, empty_huge

# T tokens of the step, packed   S rows that are sampled   G of these that are greedy
# C hidden size   V vocabulary
# H query heads   K KV heads (both: of this rank)   D head size   F MLP channels


class NativeDecoder:
    """A `quire.kernels.decoder.Decoder`. Not for two threads at once: it works in memory of its
    own, kept from call to call."""

    def __init__(self, library: ctypes.CDLL, weights: DecoderWeights, shape: DecoderShape) -> None:
        """All of ``weights`` are contiguous, of one dtype, their linear layers packed."""
        self._library = library
        self._weights, self._shape = weights, shape  # the library holds pointers into them
        self._dtype = weights.norm_C.dtype
        layers = [_layer(layer) for layer in weights.layers]
        self._layers = (native_abi.Layer * len(layers))(*layers)
        self._kv: KvCache | None = None
        self._num_tokens = 0
        self._buffers: dict[str, Tensor] = {}
        lm_head = _packed(weights.lm_head)
        self._vocab_size = lm_head.num_out
        assert self._vocab_size < 1 << 24, "float32 holds a greatest logit's column"
        self._arguments = native_abi.ForwardArgs(
            dtype=native_abi.DTYPES[self._dtype],
            is_shared=shape.is_shared,
            num_layers=len(layers),
            layers=self._layers,
            embedding=weights.embedding_VC.data_ptr(),
            final_norm=weights.norm_C.data_ptr(),
            lm_head=lm_head.weights,
            hidden_size=len(weights.norm_C),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            eps=shape.eps,
            scale=shape.scale,
            cos=shape.cos_PR.data_ptr(),
            sin=shape.sin_PR.data_ptr(),
        )

    def forward(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        all_reduce: Callable[[Tensor], Tensor],
        greatest_G2: Tensor | None = None,
    ) -> Tensor:
        num_tokens, num_samples = len(batch.token_ids_T), len(batch.last_tokens_S)
        self._use_kv(kv)
        self._make_room(num_tokens)
        num_greedy = 0 if greatest_G2 is None else len(greatest_G2)
        logits_SV = torch.empty(num_samples - num_greedy, self._vocab_size)
        self._arguments.logits = logits_SV.data_ptr()
        self._arguments.num_greedy = num_greedy
        if greatest_G2 is not None:
            self._arguments.greatest = _pointer(greatest_G2, torch.float32)
        self._check(batch)
        self._use_batch(batch)
        num_phases = 2 * len(self._layers) + 1
        if not self._shape.is_shared:
            self._run(0, num_phases)
        else:
            partial_TC = self._buffers["partial"][:num_tokens]
            for phase in range(num_phases):
                self._run(phase, phase + 1)
                if phase + 1 < num_phases:
                    all_reduce(partial_TC)
        return logits_SV

    def _run(self, first_phase: int, end_phase: int) -> None:
        self._arguments.first_phase = first_phase
        self._arguments.end_phase = end_phase
        self._library.quire_forward(byref(self._arguments))

    def _use_kv(self, kv: KvCache) -> None:
        if kv is self._kv:
            return
        for layer, (k_cache, v_cache) in zip(self._layers, kv, strict=True):
            assert k_cache.is_contiguous()
            assert v_cache.is_contiguous()
            assert k_cache.dtype == v_cache.dtype in (self._dtype, torch.int8)
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            for cache in (k_cache, v_cache):
                self._library.quire_huge_pages(cache.data_ptr(), cache.nbytes)
        self._arguments.block_size = kv[0][0].shape[1]
        self._arguments.cache_is_int8 = kv[0][0].dtype == torch.int8
        self._kv = kv

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens <= self._num_tokens:
            return
        shape, hidden_size = self._shape, len(self._weights.norm_C)
        num_heads, num_kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
        mlp_size = max(_packed(layer.gate_up).num_out for layer in self._weights.layers)
        widths = {
            "residual": hidden_size,
            "normed": hidden_size,
            "qkv": (num_heads + 2 * num_kv_heads) * head_size,
            "attended": num_heads * head_size,
            "hidden": mlp_size,
        }
        self._buffers = {
            name: empty_huge(self._library, (num_tokens, width), self._dtype)
            for name, width in widths.items()
        }
        if shape.is_shared:
            partial = empty_huge(self._library, (num_tokens, hidden_size), torch.float32)
            self._buffers["partial"] = partial
        layers = self._weights.layers
        linears = [x for layer in layers for x in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        linears.append(self._weights.lm_head)
        int8 = [linear for linear in linears if isinstance(linear, Int8Linear)]
        if int8:
            width = max(linear.input_bytes for linear in int8)
            splits = max(linear.weights.splits for linear in int8)
            self._buffers["quantized"] = empty_huge(self._library, (num_tokens, width), torch.uint8)
            self._buffers["scales"] = torch.empty(num_tokens, splits)
            self._arguments.quantized_stride = width
        for name, buffer in self._buffers.items():
            setattr(self._arguments, name, buffer.data_ptr())
        self._num_tokens = num_tokens

    def _check(self, batch: Batch) -> None:
        """What the library takes on trust. A wrong index would read or write anywhere."""
        num_slots = self._kv[0][0].shape[:2].numel() if self._kv else 0
        for name, indices, end in (
            ("token id", batch.token_ids_T, len(self._weights.embedding_VC)),
            ("position", batch.positions_T, len(self._shape.cos_PR)),
            ("slot", batch.slot_mapping_T, num_slots),
        ):
            if len(indices):
                least, most = (int(bound) for bound in torch.aminmax(indices))
                if least < 0 or most >= end:
                    wrong = least if least < 0 else most
                    raise IndexError(f"index out of range: {name} {wrong}, must be below {end}")

    def _use_batch(self, batch: Batch) -> None:
        arguments = self._arguments
        arguments.num_threads = torch.get_num_threads()
        arguments.num_tokens = len(batch.token_ids_T)
        arguments.token_ids = _pointer(batch.token_ids_T, torch.int64)
        arguments.positions = _pointer(batch.positions_T, torch.int64)
        arguments.slots = _pointer(batch.slot_mapping_T, torch.int64)
        arguments.block_tables = _pointer(batch.block_tables_BM, torch.int32)
        arguments.bt_stride = batch.block_tables_BM.stride(0)
        arguments.seq_lens = _pointer(batch.seq_lens_B, torch.int32)
        arguments.query_starts = _pointer(batch.query_starts_B1, torch.int32)
        arguments.num_rows = len(batch.seq_lens_B)
        arguments.num_decodes = batch.num_decodes
        arguments.num_samples = len(batch.last_tokens_S)
        self._last_tokens_S = batch.last_tokens_S.long()  # kept until the next step
        arguments.last_tokens = _pointer(self._last_tokens_S, torch.int64)


def _layer(layer: DecoderLayer) -> native_abi.Layer:
    return native_abi.Layer(
        attention_norm=layer.attention_norm_C.data_ptr(),
        mlp_norm=layer.mlp_norm_C.data_ptr(),
        qkv=_packed(layer.qkv).weights,
        o=_packed(layer.o).weights,
        gate_up=_packed(layer.gate_up).weights,
        down=_packed(layer.down).weights,
    )


def _packed(linear: object) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


def _pointer(tensor: Tensor, dtype: torch.dtype) -> int:
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.stride(-1) == 1 or tensor.shape[-1] <= 1
    return tensor.data_ptr()
