"""One rank's model, KV cache and sampler: turns a `StepInput` into a `StepOutput`.

It is set up in two steps: first it loads the weights, which shows how much memory is left; then the
ranks agree on the number of blocks, and it allocates the KV cache.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import Batch, Hidden
from quire.kernels.ops import KvCache, ProgramRunner
from quire.kernels.shared_prefix import (
    MIN_SAVED_BYTES,
    SharedArrays,
    SharedSplits,
    find_shared,
)
from quire.kernels.torch.products import make_batch_invariant
from quire.worker.blocks.kv_format import Bytes
from quire.worker.model.config import (
    check_settings,
    read_model_spec,
    resolve_dtype,
    resolve_max_model_len,
)
from quire.worker.model.load import load_model
from quire.worker.model.numerics import numerics
from quire.worker.parts.adapters.rank import RankAdapters
from quire.worker.rank import kv as kv_cache
from quire.worker.rank.collectives import TensorParallel
from quire.worker.rank.copies import CACHE, HOST, BlockCopies, CacheLayout
from quire.worker.rank.gpu_profile import (
    graph_bytes,
    largest_steps,
    peak_bytes,
    warm_up_steps,
    with_adapters,
)
from quire.worker.rank.graphs import Bucket, CudaCapture, DecodeGraphs, make_buckets
from quire.worker.rank.host_memory import num_host_blocks
from quire.worker.rank.late_tokens import Done, LateTokens, NoTokens, Pending
from quire.worker.rank.model import Model
from quire.worker.rank.sampling.device import DeviceSampler
from quire.worker.rank.sampling.draw import sample
from quire.worker.rank.sampling.head import HeadRows, edits_of, head_rows, sample_beside
from quire.worker.rank.staging import Array, stage
from quire.worker.request.arrays import Ints, Longs
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments
from quire.worker.weights.loader import Shard


class ModelRunner:
    """A rank. Call `num_blocks_that_fit`, then `allocate`, then `execute` or `launch` per step."""

    def __init__(self, config: EngineConfig, *, device: torch.device, tp: TensorParallel) -> None:
        """Loads this rank's share of the weights.

        Raises:
            CheckpointError: The model's files cannot be read.
            ConfigError: The model cannot be run with this configuration.
        """
        spec = read_model_spec(config.model, model_impl=config.model_impl)
        check_settings(config, spec)
        self._max_model_len = resolve_max_model_len(config, spec)
        self._config = config
        self._device = device
        dtype = self._dtype = getattr(torch, resolve_dtype(config, spec))
        shard = Shard(rank=tp.rank, size=tp.size)
        loaded = load_model(
            config,
            spec,
            shard=shard,
            dtype=dtype,
            device=device,
            max_model_len=self._max_model_len,
        )
        self._model = Model(loaded.runner, vocab_size=spec.vocab_size, tp=tp)
        self._adapters: RankAdapters | None = None
        if config.enable_lora:
            slots = loaded.runner.adapters
            if slots is None:
                raise ConfigError(
                    f"enable_lora=True: the kernels for this model on {device.type!r} take no "
                    "adapters; leave it out"
                )
            self._adapters = RankAdapters(slots, config, spec, shard=shard, dtype=dtype)
        self._sees_all = not any(each.window for each in loaded.options)
        """Whether queries of all layers attend to all tokens before them (no sliding window)."""
        self._layout = kv_cache.kv_layout(
            config, loaded.attentions, dtype=resolve_dtype(config, spec)
        )
        self.kv_format = kv_cache.kv_format(self._layout, loaded.attentions[0])
        kv_cache.check_host_memory(config)
        self.num_host_blocks = 0 if spec.is_encoder else num_host_blocks(config, self.kv_format)
        """Slots of host memory that `allocate` needs."""
        self._is_head_major = loaded.is_head_major
        self._shard = shard
        self._group = loaded.attentions[0].num_heads // tp.size // self._layout.num_kv_heads
        is_described = spec.through_transformers is None
        if not is_described:
            self._check_rows(loaded.runner, spec.vocab_size, is_encoder=spec.is_encoder)
        self._is_encoder = spec.is_encoder
        self._min_saved_tokens = MIN_SAVED_BYTES // self._layout.layer_token_bytes
        self.numerics = numerics(
            config, spec, device=device, num_ranks=tp.size, is_native=self._model.chooses
        )
        """Everything besides the weights that determines the bits of outputs."""
        self._vocab_size = spec.vocab_size if tp.rank == 0 else None
        self._kv: KvCache = []
        self._copies: BlockCopies
        self._graphs: DecodeGraphs | None = None
        self._buckets: list[Bucket] = []
        self._device_sampler: DeviceSampler | None = None
        if device.type == "cuda":
            self._device_sampler = DeviceSampler(device)
            if not config.enforce_eager and is_described:
                self._buckets = make_buckets(
                    max_num_seqs=config.max_num_seqs,
                    max_model_len=self._max_model_len,
                    with_adapters=config.enable_lora,
                )
        self._tp = tp
        self._sampled_S = torch.empty(0, dtype=torch.int64)
        """The tokens of the last step; 0 on ranks that do not have them."""

    @torch.inference_mode()
    def _check_rows(self, runner: ProgramRunner, vocab_size: int, *, is_encoder: bool) -> None:
        from quire.worker.model.through.rows import LENGTHS, check_rows, num_blocks

        if self._max_model_len > max(LENGTHS):
            kv = kv_cache.allocate(
                self._layout,
                num_blocks=num_blocks(self._layout.block_size),
                device=self._device,
            )
            check_rows(
                self._config,
                runner,
                kv,
                vocab_size=vocab_size,
                device=self._device,
                is_encoder=is_encoder,
            )

    def num_blocks_that_fit(self) -> int:
        """Blocks of KV for which this rank has room. On a GPU, runs the largest steps."""
        config = self._config
        if self._is_encoder:  # The KV of a step is not used by later ones.
            num_tokens = config.max_num_batched_tokens
            return -(-num_tokens // self._layout.block_size) + config.max_num_seqs
        share_bytes = 0
        if config.num_blocks is None and config.kv_cache_memory_bytes is None:
            if self._device.type == "cuda":
                share_bytes = kv_cache.gpu_share_bytes(
                    config, self._device, peak_bytes=self._bytes_beside_kv()
                )
            else:
                share_bytes = kv_cache.cpu_share_bytes(config)
        return kv_cache.plan_num_blocks(config, self._layout, share_bytes=share_bytes)

    def allocate(self, num_blocks: int, host_blocks_XC: Bytes | None = None) -> None:
        """Allocates the KV cache. ``host_blocks_XC`` is memory that all ranks of the node share.

        Raises:
            ConfigError: The cache could not hold one sequence of the greatest length.
        """
        kv_cache.check_room(
            self._config, self._layout, num_blocks=num_blocks, max_model_len=self._max_model_len
        )
        # One more block, for the padding rows of graphs.
        self._kv = kv_cache.allocate(
            self._layout, num_blocks=num_blocks + bool(self._buckets), device=self._device
        )
        self._copies = BlockCopies(
            self._kv,
            layout=CacheLayout(format=self.kv_format, is_head_major=self._is_head_major),
            shard=self._shard,
            host_blocks_XC=host_blocks_XC,
            meet=self._meet,
        )
        if self._buckets:
            self._graphs = self._decode_graphs(self._kv)
            for bucket in reversed(self._graphs.buckets):
                self._graphs.capture(bucket)
        if self._device.type == "cuda":
            self.warm_up()

    def warm_up(self) -> None:
        """Launches every kernel that serving may need, so that none is compiled while requests
        wait: eager chunks and decodes, decodes with a shared prefix, tokens of the step before,
        penalties, bans, all sampling limits, log-probabilities."""
        *chunks, decodes = warm_up_steps(
            self._config, block_size=self._layout.block_size, max_model_len=self._max_model_len
        )
        if self.num_host_blocks:
            there_and_back = (((CACHE, 0), (HOST, 0)), ((HOST, 0), (CACHE, 0)))
            self._copies.run(np.array(there_and_back, np.int32))
        graphs, self._graphs = self._graphs, None
        for step in (*chunks, decodes):
            self.execute(step)
            if self._adapters is not None:
                self.execute(with_adapters(step))
        self._graphs = graphs
        self.execute(decodes)
        shared = self._find_shared(decodes, min_saved_tokens=1)
        if shared is not None:
            self._model.forward(self._to_device(decodes, shared), self._kv)

    def launch(
        self, step: StepInput, edits: Callable[[], Adjustments | None] | None = None
    ) -> Pending | None:
        """Runs the model once. Rank 0 returns the pending output, the others ``None``.

        ``edits`` waits for the adjustments of a step that has ``edits_follow`` set.

        On a GPU this returns while the device works, and the next step may be launched before the
        caller waits for this one's tokens. On a CPU the output is ready.
        """
        pending = self._launch(step, edits)
        if pending is None:
            count = len(step.samples_S)
            self._sampled_S = torch.zeros(count, dtype=torch.int64, device=self._device)
        else:
            self._sampled_S = pending.token_ids_S
        return pending

    def execute(self, step: StepInput) -> StepOutput | None:
        """Calls `launch` and waits for the output."""
        pending = self.launch(step)
        return None if pending is None else pending.wait()

    def forward(self, step: StepInput, hidden: Hidden | None = None) -> Tensor | None:
        """Computes the step. Returns logits ``[S, V]`` on rank 0, ``None`` on other ranks: float32
        on a CPU; on a GPU in the model's type, and valid until the next step. Fills ``hidden``.
        """
        late = self._late_tokens(step)
        shared = self._find_shared(step)
        if shared is None and self._graphs is not None:
            bucket = self._graphs.bucket_of(step)
            if bucket is not None:
                return self._graphs.run(step, bucket, late)
        return self._model.forward(self._to_device(step, shared, late, hidden), self._kv)

    def _launch(
        self, step: StepInput, edits: Callable[[], Adjustments | None] | None
    ) -> Pending | None:
        if step.adapter_loads:
            assert self._adapters is not None, "the engine refuses adapters"
            self._adapters.load(step.adapter_loads)
        if step.copies_X22 is not None:
            self._copies.run(step.copies_X22)
        if not len(step.token_ids_T):
            self._meet()
            return None if self._tp.rank else NoTokens(self._device)
        if self._is_encoder:
            return self._encode(step)
        rows = None
        if self._model.chooses and not step.edits_follow:
            rows = head_rows(step.sampling)
        hidden = self._wanted_hidden(step, rows)
        if rows is not None:
            chosen = self._forward_and_choose(step, rows, hidden)
            if chosen is None:
                return None
            return _done(sample_beside(chosen, step.sampling, rows), hidden)
        logits_SV = self.forward(step, hidden)
        if logits_SV is None:
            return None
        sampling = step.sampling
        if step.edits_follow:
            assert edits is not None, "edits_follow is set, so they are sent"
            sampling = replace(sampling, adjustments=edits())
        if self._device_sampler is not None:
            values_HC = None if hidden is None else hidden.values_HC
            return self._device_sampler.sample(logits_SV, sampling, values_HC)
        return _done(sample(logits_SV, sampling, in_place=True), hidden)

    def _meet(self) -> None:
        """A barrier of all ranks. On a GPU, it delays the work queued after it instead."""
        self._tp.all_reduce(torch.zeros(1, device=self._device))

    def _encode(self, step: StepInput) -> Pending:
        hidden = self._wanted_hidden(step, None)
        self._model.forward(self._to_device(step, hidden=hidden), self._kv)
        return _done(StepOutput(np.zeros(len(step.samples_S), np.int64)), hidden)

    def _wanted_hidden(self, step: StepInput, rows: HeadRows | None) -> Hidden | None:
        """The hidden states to collect on rank 0, whose program has them complete."""
        if step.hidden_rows_H is None or self._tp.rank:
            return None
        rows_H = torch.from_numpy(step.hidden_rows_H).long()
        if rows is not None:
            rows_H = torch.from_numpy(np.argsort(rows.order_S))[rows_H]
        return Hidden(rows_H.to(self._device))

    def _forward_and_choose(
        self, step: StepInput, rows: HeadRows, hidden: Hidden | None
    ) -> tuple[Tensor, Longs] | None:
        """The logits of rows that are not greedy, and the tokens of greedy rows."""
        batch = self._to_device(step, late=self._late_tokens(step), hidden=hidden)
        last_tokens_S = batch.last_tokens_S[torch.from_numpy(rows.order_S)]
        return self._model.forward_and_choose(
            replace(batch, last_tokens_S=last_tokens_S),
            self._kv,
            num_greedy=rows.num_greedy,
            edits=edits_of(step.sampling, rows),
            wanted=rows.wanted,
        )

    def _late_tokens(self, step: StepInput) -> LateTokens | None:
        """The sampled tokens of the previous step that this one needs. Only rank 0 has them."""
        if not len(step.late_tokens_L):
            return None
        return LateTokens(
            sampled_S=self._tp.all_reduce(self._sampled_S),
            tokens_L=step.late_tokens_L,
            rows_L=step.late_rows_L,
        )

    def _find_shared(
        self, step: StepInput, *, min_saved_tokens: int | None = None
    ) -> SharedArrays | None:
        """The shared context of several decodes, if it pays to read it once for all of them."""
        if self._device.type == "cpu" or not self._sees_all:
            return None
        return find_shared(
            step.block_tables_BM[: step.num_decodes],
            step.seq_lens_B[: step.num_decodes],
            block_size=self._layout.block_size,
            group=self._group,
            min_saved_tokens=self._min_saved_tokens
            if min_saved_tokens is None
            else min_saved_tokens,
        )

    def _to_device(
        self,
        step: StepInput,
        shared: SharedArrays | None = None,
        late: LateTokens | None = None,
        hidden: Hidden | None = None,
    ) -> Batch:
        query_lens_B = np.diff(step.query_starts_B1)
        arrays: dict[str, Array] = {
            "token_ids_T": step.token_ids_T,
            "positions_T": step.positions_T,
            "slot_mapping_T": step.slot_mapping_T,
            "block_tables_BM": step.block_tables_BM,
            "seq_lens_B": step.seq_lens_B,
            "query_starts_B1": step.query_starts_B1,
            "last_tokens_S": step.samples_S,
        }
        if len(step.adapter_slots_A):
            arrays["adapter_slots_T"] = _slots_of_tokens(step, query_lens_B)
        if late is not None:
            arrays |= {"late_tokens_L": late.tokens_L, "late_rows_L": late.rows_L}
        if shared is not None:
            arrays |= {name: getattr(shared, name) for name in shared.__slots__}
        staged = dict(zip(arrays, stage(list(arrays.values()), self._device), strict=True))
        splits = None
        if shared is not None:
            splits = SharedSplits(**{name: staged.pop(name) for name in shared.__slots__})
        if late is not None:
            tokens_L, rows_L = staged.pop("late_tokens_L"), staged.pop("late_rows_L")
            staged["token_ids_T"] = late.put(staged["token_ids_T"].clone(), tokens_L, rows_L)
        return Batch(
            **staged,
            shared=splits,
            hidden=hidden,
            num_decodes=step.num_decodes,
            max_query_len=int(query_lens_B.max()),
            max_seq_len=int(step.seq_lens_B.max()),
        )

    def _decode_graphs(self, kv: KvCache) -> DecodeGraphs:
        """The decode graphs for this cache, none captured yet. Its last block is the spare one."""
        return DecodeGraphs(
            lambda batch: self._model.forward(batch, kv),
            buckets=self._buckets,
            block_size=self._layout.block_size,
            spare_block=len(kv[0][0]) - 1,
            vocab_size=self._vocab_size,
            dtype=self._dtype,
            device=self._device,
            capture=CudaCapture(),
        )

    def _bytes_beside_kv(self) -> int:
        """Most bytes that a GPU holds, without the KV cache."""
        kv = kv_cache.allocate(self._layout, num_blocks=1, device=self._device)

        def run(step: StepInput) -> None:
            logits_SV = self._model.forward(self._to_device(step), kv)
            if logits_SV is not None and self._device_sampler is not None:
                self._device_sampler.sample(logits_SV, step.sampling).wait()

        steps = largest_steps(
            self._config, block_size=self._layout.block_size, max_model_len=self._max_model_len
        )
        if self._adapters is not None:
            steps = map(with_adapters, steps)
        peak = peak_bytes(run, steps)
        return peak + (graph_bytes(lambda: self._decode_graphs(kv)) if self._buckets else 0)


def _slots_of_tokens(step: StepInput, query_lens_B: Ints) -> Ints:
    """The slot of each token's adapter; tokens that belong to no row have none."""
    slots_T = np.full(len(step.token_ids_T), -1, np.int32)
    slots_T[: step.query_starts_B1[-1]] = step.adapter_slots_A.repeat(query_lens_B)
    return slots_T


def _done(output: StepOutput, hidden: Hidden | None) -> Done:
    if hidden is not None and hidden.values_HC is not None:
        output = replace(output, hidden_HC=hidden.values_HC.cpu().numpy())
    return Done(output)


def pick_device(config: EngineConfig, *, rank: int, num_ranks: int | None = None) -> torch.device:
    """The device of a rank: its own GPU, or the CPU that all ranks share.

    ``num_ranks`` ranks share the GPUs that this process sees, and ``rank`` is this one's index
    among them. ``None`` means all ranks of the group.

    Raises:
        ConfigError: A GPU was requested and there is none for this rank, or there is one and a
            requested feature runs on CPUs only.
    """
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and num_gpus == 0):
        config.check_device("cpu")
        return torch.device("cpu")
    if num_gpus < (num_ranks or config.tensor_parallel_size):
        raise ConfigError(
            f"device={config.device!r}, tensor_parallel_size={config.tensor_parallel_size}: each "
            f"rank needs a GPU of its own, {num_gpus} found; set device='cpu' to run without"
        )
    config.check_device("cuda")
    if config.deterministic:
        make_batch_invariant()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
