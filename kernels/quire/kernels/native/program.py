"""Runs a program in one call of the native library, or one call per section between all-reduces."""

import ctypes
from collections.abc import Callable
from ctypes import byref

import torch
from torch import Tensor

from quire.kernels.batch import Batch, GreedyEdits, WantedColumns
from quire.kernels.native import abi as native_abi
from quire.kernels.native.adapters import NativeAdapters
from quire.kernels.native.check import check_caches, pointer, rows_pointer
from quire.kernels.native.linear import empty_huge
from quire.kernels.native.ops import NativeOps
from quire.kernels.ops import KvCache, Program

# T tokens of the step, packed   S rows that are sampled   G of these that are greedy
# V vocabulary


class NativeProgram:
    """A `quire.kernels.ops.ProgramRunner`. Not thread-safe: it reuses its working memory from call
    to call."""

    chooses = True

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        """All weights are contiguous and of one dtype.

        Raises:
            NotNative: The library does not support this program.
            ValueError: Its weights do not fit each other.
        """
        self._library = library
        native = self._native = NativeOps(program)  # the library holds pointers into its weights
        self._ops = (native_abi.Op * len(native.ops))(*map(native_abi.op_of, native.ops))
        self.adapters = NativeAdapters(library, native.adapted, self._ops, native.dtype)
        self._rank = 0  # of the adapters for which there is memory
        self._sums = [(0, 0, 0), *native.ends]
        self._ends = [*(place for place, _, _ in native.ends), len(native.ops)]
        self._kv: KvCache | None = None
        self._num_tokens = 0
        self._buffers: dict[int, Tensor] = {}
        self._quantized: tuple[Tensor, ...] = ()
        heads = native.heads
        self._arguments = native_abi.ForwardArgs(
            dtype=native_abi.DTYPES[native.dtype],
            ops=self._ops,
            vocab_size=native.vocab_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            num_positions=native.num_positions,
        )

    def forward(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        all_reduce: Callable[[Tensor], Tensor],
        greatest_G2: Tensor | None = None,
        edits: GreedyEdits | None = None,
        wanted: WantedColumns | None = None,
    ) -> Tensor:
        num_tokens, num_samples = len(batch.token_ids_T), len(batch.last_tokens_S)
        self._use_kv(kv)
        self._make_room(num_tokens)
        num_greedy = 0 if greatest_G2 is None else len(greatest_G2)
        if not num_greedy <= num_samples <= num_tokens:  # their norms are where the tokens' were
            raise ValueError(
                f"{num_tokens} tokens, {num_samples} sampled rows, {num_greedy} of them greedy: "
                "must not be more than the number before"
            )
        logits_SV = torch.empty(num_samples - num_greedy, self._native.num_columns)
        self._arguments.logits = logits_SV.data_ptr()
        self._arguments.num_greedy = num_greedy
        if greatest_G2 is not None:
            greatest = pointer("greatest logits", greatest_G2, torch.float32, num_greedy, 2)
            self._arguments.greatest = greatest
        native_edits = None if edits is None else _native_edits(edits, num_greedy=num_greedy)
        self._arguments.edits = None if native_edits is None else ctypes.pointer(native_edits)
        native_wanted = None if wanted is None else _native_wanted(wanted, num_samples=num_samples)
        self._arguments.wanted = None if native_wanted is None else ctypes.pointer(native_wanted)
        self._use_batch(batch)
        for (first, buffer, width), end in zip(self._sums, self._ends, strict=True):
            if first:
                width += self._rank_behind(first)
                values = self._buffers[buffer].view(-1)[: num_tokens * width]
                all_reduce(values.view(num_tokens, width))
            self._arguments.first_op, self._arguments.end_op = first, end
            self._library.quire_forward(byref(self._arguments))
        if batch.hidden is not None:
            normed = native_abi.BUFFERS["normed"]  # The last norm's, of the rows that are sampled.
            width = self._native.widths[normed]
            values = self._buffers[normed].view(-1)[: num_samples * width]
            batch.hidden.take(values.view(num_samples, width))
        return logits_SV

    def _use_kv(self, kv: KvCache) -> None:
        if kv is self._kv:
            return
        num_layers = len({layer for _, layer in self._native.caches})
        if len(kv) != num_layers:
            raise ValueError(f"KV caches of {len(kv)} layers: the model has {num_layers}")
        dtype, (num_blocks, block_size) = kv[0][0].dtype, kv[0][0].shape[:2]
        for k_cache, v_cache in kv:
            sizes = check_caches(
                *(k_cache, v_cache),
                dtype=self._native.dtype,
                num_kv_heads=self._native.heads.num_kv_heads,
                head_size=self._native.heads.head_size,
            )
            if (k_cache.dtype, *sizes) != (dtype, num_blocks, block_size):
                raise ValueError(
                    f"KV cache of {sizes} blocks and tokens a block in {k_cache.dtype}: "
                    f"the first layer's is of {(num_blocks, block_size)} in {dtype}"
                )
        for place, layer in self._native.caches:
            is_attend = self._ops[place].kind == native_abi.ATTEND
            op = self._ops[place].attend if is_attend else self._ops[place].rotate_and_write
            op.k_cache, op.v_cache = (cache.data_ptr() for cache in kv[layer])
        for cache in (cache for pair in kv for cache in pair):
            self._library.quire_huge_pages(cache.data_ptr(), cache.nbytes)
        self._arguments.num_blocks = num_blocks
        self._arguments.block_size = block_size
        self._arguments.cache_is_int8 = dtype == torch.int8
        self._kv = kv

    def _rank_behind(self, place: int) -> int:
        """Values per token of adapters' A x, which follow those of a sum over the ranks."""
        if not self._arguments.adapter_slots:
            return 0
        op = self._ops[place]
        return int((op.round_partial if op.kind == native_abi.ROUND_PARTIAL else op.mix).rank)

    def _make_room(self, num_tokens: int) -> None:
        rank = self.adapters.rank
        if num_tokens <= self._num_tokens and rank <= self._rank:
            return
        num_tokens = max(num_tokens, self._num_tokens)
        library, native, arguments = self._library, self._native, self._arguments
        for which, width in native.widths.items():
            dtype = native_abi.BUFFER_TYPES.get(which, native.dtype)
            more = rank if which in native_abi.SUMMED else 0
            self._buffers[which] = empty_huge(library, (num_tokens, width + more), dtype)
            arguments.buffers[which] = self._buffers[which].data_ptr()
            arguments.widths[which] = width
        if native.quantized:
            width = max(layer.input_bytes for layer in native.quantized)
            splits = max(layer.weights.splits for layer in native.quantized)
            num_rows = num_tokens * native.quantized_rows
            values = empty_huge(library, (num_rows, width), torch.uint8)
            scales = torch.empty(num_rows, splits)
            arguments.quantized, arguments.scales = values.data_ptr(), scales.data_ptr()
            arguments.quantized_stride, arguments.max_splits = width, splits
            self._quantized = (values, scales)
        self._ax_TR = torch.empty(num_tokens, rank)
        arguments.low_rank = self._ax_TR.data_ptr()
        self._num_tokens, self._rank = num_tokens, rank

    def _use_batch(self, batch: Batch) -> None:
        """Sets the pointers to the batch, whose indices the library checks when it runs."""
        arguments = self._arguments
        num_tokens, num_rows = len(batch.token_ids_T), len(batch.seq_lens_B)
        tables_BM = batch.block_tables_BM
        arguments.num_threads = torch.get_num_threads()
        arguments.num_tokens = num_tokens
        for name, indices_T in (
            ("token_ids", batch.token_ids_T),
            ("positions", batch.positions_T),
            ("slots", batch.slot_mapping_T),
        ):
            setattr(arguments, name, pointer(name, indices_T, torch.int64, num_tokens))
        slots_T, arguments.num_slots = batch.adapter_slots_T, self.adapters.num_slots
        arguments.adapter_slots = None
        if slots_T is not None:
            slots = pointer("adapter slots", slots_T, torch.int32, num_tokens)
            arguments.adapter_slots = slots
        width = tables_BM.shape[1]
        arguments.block_tables = rows_pointer(
            "block tables", tables_BM, torch.int32, num_rows, width
        )
        arguments.bt_stride = tables_BM.stride(0)
        arguments.bt_width = width
        arguments.seq_lens = pointer(
            "lengths of sequences", batch.seq_lens_B, torch.int32, num_rows
        )
        arguments.query_starts = pointer(
            "query starts", batch.query_starts_B1, torch.int32, num_rows + 1
        )
        arguments.num_rows = num_rows
        arguments.num_samples = len(batch.last_tokens_S)
        self._last_tokens_S = batch.last_tokens_S.long()  # kept until the next step
        arguments.last_tokens = pointer(
            "last tokens", self._last_tokens_S, torch.int64, len(batch.last_tokens_S)
        )


def _native_wanted(wanted: WantedColumns, *, num_samples: int) -> ctypes.Structure:
    """Raises ValueError where the arrays do not fit each other."""
    return native_abi.WantedColumns(
        mask_of=pointer("rows of wanted columns", wanted.mask_of_S, torch.int32, num_samples),
        masks=pointer("wanted columns", wanted.mask_KW, torch.int32, *wanted.mask_KW.shape),
        num_words=wanted.mask_KW.shape[1],
        first_column=wanted.first_column,
    )


def _native_edits(edits: GreedyEdits, *, num_greedy: int) -> ctypes.Structure:
    """Raises ValueError where the arrays do not fit each other."""
    num_biased, num_seen = len(edits.biased_ids_A), len(edits.seen_ids_E)
    long, whole, real = torch.int64, torch.int32, torch.float32
    arrays = {
        "biased_starts": pointer("starts of biases", edits.biased_starts_G1, long, num_greedy + 1),
        "biased_ids": pointer("biased tokens", edits.biased_ids_A, whole, num_biased),
        "bias": pointer("biases", edits.bias_A, real, num_biased),
        "seen_starts": pointer("starts of seen", edits.seen_starts_G1, long, num_greedy + 1),
        "seen_ids": pointer("seen tokens", edits.seen_ids_E, whole, num_seen),
        "seen_counts": pointer("counts of seen", edits.seen_counts_E, whole, num_seen),
        "presence": pointer("presence penalties", edits.presence_G, real, num_greedy),
        "frequency": pointer("frequency penalties", edits.frequency_G, real, num_greedy),
        "repetition": pointer("repetition penalties", edits.repetition_G, real, num_greedy),
        "mask_of": pointer("rows of masks", edits.mask_of_G, whole, num_greedy),
        "masks": pointer("masks", edits.mask_KW, whole, *edits.mask_KW.shape),
    }
    return native_abi.GreedyEdits(
        **arrays, num_words=edits.mask_KW.shape[1], first_column=edits.first_column
    )
