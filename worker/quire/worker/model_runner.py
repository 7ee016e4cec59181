"""One rank's model, KV cache and sampler: turns a `StepInput` into a `StepOutput`.

Made in two steps, as the number of blocks must be agreed on in between: first the weights, which
show how much memory is left, then the KV cache.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.backend import backend_for
from quire.kernels.decoder import Batch, KvCache
from quire.kernels.shared_prefix import SharedArrays, SharedSplits, find_shared
from quire.worker import kv_cache
from quire.worker.checkpoint import open_checkpoint
from quire.worker.config import EngineConfig
from quire.worker.decode_graphs import Bucket, CudaCapture, DecodeGraphs, make_buckets
from quire.worker.device_sampler import DeviceSampler
from quire.worker.errors import ConfigError
from quire.worker.gpu_profile import graph_bytes, largest_steps, peak_bytes
from quire.worker.greedy import MIN_GREEDY_ROWS, greedy_rows, sample_beside
from quire.worker.llama import Llama, attention_options
from quire.worker.loader import Shard, load_weights
from quire.worker.model_config import (
    check_parallel,
    read_model_config,
    resolve_dtype,
    resolve_max_model_len,
)
from quire.worker.sampler import sample
from quire.worker.staging import Array, stage
from quire.worker.step import Longs, StepInput, StepOutput
from quire.worker.tensor_parallel import TensorParallel


class ModelRunner:
    """A rank. Call `num_blocks_that_fit`, then `allocate`, then `execute` for each step."""

    def __init__(self, config: EngineConfig, *, device: torch.device, tp: TensorParallel) -> None:
        """Loads this rank's share of the weights.

        Raises:
            CheckpointError: The model's files cannot be read.
            ConfigError: The model cannot be run like this.
        """
        model = read_model_config(config.model)
        check_parallel(model, config.tensor_parallel_size)
        self._max_model_len = resolve_max_model_len(config, model)
        self._config = config
        self._device = device
        dtype = getattr(torch, resolve_dtype(config, model))
        if config.kv_cache_dtype == "fp8" and dtype == torch.float32:
            raise ConfigError(
                "kv_cache_dtype='fp8' with dtype='float32': the kernels read it with 16-bit "
                "queries; use dtype='bfloat16', or kv_cache_dtype='auto'"
            )
        backend = backend_for(
            device,
            quantization=config.quantization,
            options=attention_options(model, self._max_model_len),
        )
        weights = load_weights(
            open_checkpoint(config.model),
            model,
            shard=Shard(rank=tp.rank, size=tp.size),
            dtype=dtype,
            device=device,
            backend=backend,
        )
        self._llama = Llama(
            model,
            weights,
            backend=backend,
            tp=tp,
            max_model_len=self._max_model_len,
        )
        self._layout = kv_cache.kv_layout(config, model, dtype=dtype)
        self._vocab_size = model.vocab_size if tp.rank == 0 else None
        self._kv: KvCache = []
        self._graphs: DecodeGraphs | None = None
        self._buckets: list[Bucket] = []
        self._device_sampler: DeviceSampler | None = None
        if device.type == "cuda":
            self._device_sampler = DeviceSampler(device)
            if not config.enforce_eager:
                self._buckets = make_buckets(
                    max_num_seqs=config.max_num_seqs, max_model_len=self._max_model_len
                )
        self._tp = tp
        self._sampled_S = torch.empty(0, dtype=torch.int64)
        """The tokens of the last step, 0 where this rank does not know them."""

    def num_blocks_that_fit(self) -> int:
        """Blocks of KV for which this rank has room. On a GPU this runs the largest steps."""
        config = self._config
        share_bytes = 0
        if config.num_blocks is None and config.kv_cache_memory_bytes is None:
            if self._device.type == "cuda":
                share_bytes = kv_cache.gpu_share_bytes(
                    config, self._device, peak_bytes=self._bytes_beside_kv()
                )
            else:
                share_bytes = kv_cache.cpu_share_bytes(config)
        return kv_cache.plan_num_blocks(config, self._layout, share_bytes=share_bytes)

    def allocate(self, num_blocks: int) -> None:
        """Makes the KV cache.

        Raises:
            ConfigError: It could not hold one sequence of the greatest length.
        """
        kv_cache.check_room(
            self._config, self._layout, num_blocks=num_blocks, max_model_len=self._max_model_len
        )
        # One block more, for the rows that fill a graph's batch up.
        self._kv = kv_cache.allocate(
            self._layout, num_blocks=num_blocks + bool(self._buckets), device=self._device
        )
        if self._buckets:
            self._graphs = self._decode_graphs(self._kv)
            for bucket in reversed(self._graphs.buckets):
                self._graphs.capture(bucket)

    def execute(self, step: StepInput) -> StepOutput | None:
        """Runs the model once. Rank 0 returns the sampled tokens, the others ``None``."""
        output = self._run(self._with_late_tokens(step))
        if output is None:
            self._sampled_S = torch.zeros(len(step.sample_rows_S), dtype=torch.int64)
        else:
            self._sampled_S = torch.from_numpy(output.token_ids_S)
        return output

    def forward(self, step: StepInput) -> Tensor | None:
        """Computes the step's tokens; float32 logits ``[S, V]`` on rank 0, ``None`` elsewhere.

        On a GPU they are valid until the next step.
        """
        shared = self._find_shared(step)
        if shared is None and self._graphs is not None:
            bucket = self._graphs.bucket_of(step)
            if bucket is not None:
                return self._graphs.run(step, bucket)
        return self._llama.forward(self._to_device(step, shared), self._kv)

    def _run(self, step: StepInput) -> StepOutput | None:
        greedy_S = greedy_rows(step.sampling)
        if self._llama.chooses and greedy_S.sum() >= MIN_GREEDY_ROWS:
            chosen = self._forward_and_choose(step, greedy_S)
            return None if chosen is None else sample_beside(chosen, step.sampling, greedy_S)
        logits_SV = self.forward(step)
        if logits_SV is None:
            return None
        if self._device_sampler is not None:
            return self._device_sampler.sample(logits_SV, step.sampling).wait()
        return sample(logits_SV, step.sampling)

    def _forward_and_choose(
        self, step: StepInput, greedy_S: npt.NDArray[np.bool_]
    ) -> tuple[Tensor, Longs] | None:
        """The logits of the rows that are not greedy, and the tokens of those that are."""
        batch = self._to_device(step)
        greedy_last = torch.from_numpy(np.argsort(greedy_S, kind="stable"))
        batch = replace(batch, last_tokens_S=batch.last_tokens_S[greedy_last])
        return self._llama.forward_and_choose(batch, self._kv, num_greedy=int(greedy_S.sum()))

    def _with_late_tokens(self, step: StepInput) -> StepInput:
        """``step`` with the tokens that the one before it sampled. Only rank 0 knows them."""
        if not len(step.late_tokens_L):
            return step
        sampled_S = self._tp.all_reduce(self._sampled_S.to(self._device)).cpu().numpy()
        token_ids_T = step.token_ids_T.copy()
        token_ids_T[step.late_tokens_L] = sampled_S[step.late_rows_L]
        return replace(step, token_ids_T=token_ids_T)

    def _find_shared(self, step: StepInput) -> SharedArrays | None:
        """The context that so many decodes share that it is worth reading it once."""
        if self._device.type == "cpu" or self._llama.options.window is not None:
            return None
        return find_shared(
            step.block_tables_BM[: step.num_decodes],
            step.seq_lens_B[: step.num_decodes],
            block_size=self._layout.block_size,
            group=self._llama.num_heads // self._llama.num_kv_heads,
        )

    def _to_device(self, step: StepInput, shared: SharedArrays | None = None) -> Batch:
        query_lens_B = np.diff(step.query_starts_B1)
        last_tokens_S = step.query_starts_B1[step.sample_rows_S + 1] - 1
        arrays: dict[str, Array] = {
            "token_ids_T": step.token_ids_T,
            "positions_T": step.positions_T,
            "slot_mapping_T": step.slot_mapping_T,
            "block_tables_BM": step.block_tables_BM,
            "seq_lens_B": step.seq_lens_B,
            "query_starts_B1": step.query_starts_B1,
            "last_tokens_S": last_tokens_S,
        }
        if shared is not None:
            arrays |= {name: getattr(shared, name) for name in shared.__slots__}
        staged = dict(zip(arrays, stage(list(arrays.values()), self._device), strict=True))
        splits = None
        if shared is not None:
            splits = SharedSplits(**{name: staged.pop(name) for name in shared.__slots__})
        return Batch(
            **staged,
            shared=splits,
            num_decodes=step.num_decodes,
            max_query_len=int(query_lens_B.max()),
            max_seq_len=int(step.seq_lens_B.max()),
        )

    def _decode_graphs(self, kv: KvCache) -> DecodeGraphs:
        """The graphs over this cache, whose last block is the spare one; none captured yet."""
        return DecodeGraphs(
            lambda batch: self._llama.forward(batch, kv),
            buckets=self._buckets,
            block_size=self._layout.block_size,
            spare_block=len(kv[0][0]) - 1,
            vocab_size=self._vocab_size,
            device=self._device,
            capture=CudaCapture(),
        )

    def _bytes_beside_kv(self) -> int:
        """What a GPU holds at most, without the KV cache."""
        kv = kv_cache.allocate(self._layout, num_blocks=1, device=self._device)

        def run(step: StepInput) -> None:
            logits_SV = self._llama.forward(self._to_device(step), kv)
            if logits_SV is not None and self._device_sampler is not None:
                self._device_sampler.sample(logits_SV, step.sampling).wait()

        steps = largest_steps(
            self._config, block_size=self._layout.block_size, max_model_len=self._max_model_len
        )
        peak = peak_bytes(run, steps)
        return peak + (graph_bytes(lambda: self._decode_graphs(kv)) if self._buckets else 0)


def pick_device(config: EngineConfig, *, rank: int, num_ranks: int | None = None) -> torch.device:
    """The device of a rank: its own GPU, or the CPU that all share.

    ``num_ranks`` choose among the GPUs that this process sees, ``rank`` being this one's place
    among them; ``None`` is all ranks of the group.

    Raises:
        ConfigError: A GPU was asked for and there is none for this rank, or there is one and what
            was asked for runs on CPUs only.
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
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
