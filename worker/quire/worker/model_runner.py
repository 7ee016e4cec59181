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
from quire.worker import kv_cache
from quire.worker.checkpoint import open_checkpoint
from quire.worker.config import EngineConfig
from quire.worker.errors import ConfigError
from quire.worker.greedy import MIN_GREEDY_ROWS, greedy_rows, sample_beside
from quire.worker.llama import Llama
from quire.worker.loader import Shard, load_weights
from quire.worker.model_config import (
    check_parallel,
    read_model_config,
    resolve_dtype,
    resolve_max_model_len,
)
from quire.worker.sampler import sample
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
        backend = backend_for(device, quantization=config.quantization)
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
        self._kv: KvCache = []

    def num_blocks_that_fit(self) -> int:
        """Blocks of KV for which this rank has room. On a GPU this runs the largest step."""
        config = self._config
        share_bytes = 0
        if config.num_blocks is None and config.kv_cache_memory_bytes is None:
            if self._device.type == "cuda":
                peak = self._peak_bytes()
                share_bytes = kv_cache.gpu_share_bytes(config, self._device, peak_bytes=peak)
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
        self._kv = kv_cache.allocate(self._layout, num_blocks=num_blocks, device=self._device)

    def execute(self, step: StepInput) -> StepOutput | None:
        """Runs the model once. Rank 0 returns the sampled tokens, the others ``None``."""
        greedy_S = greedy_rows(step.sampling)
        if self._llama.chooses and greedy_S.sum() >= MIN_GREEDY_ROWS:
            chosen = self._forward_and_choose(step, greedy_S)
            return None if chosen is None else sample_beside(chosen, step.sampling, greedy_S)
        logits_SV = self.forward(step)
        return None if logits_SV is None else sample(logits_SV, step.sampling)

    def forward(self, step: StepInput) -> Tensor | None:
        """Computes the step's tokens; float32 logits ``[S, V]`` on rank 0, ``None`` elsewhere."""
        return self._llama.forward(self._to_device(step), self._kv)

    def _forward_and_choose(
        self, step: StepInput, greedy_S: npt.NDArray[np.bool_]
    ) -> tuple[Tensor, Longs] | None:
        """The logits of the rows that are not greedy, and the tokens of those that are."""
        batch = self._to_device(step)
        greedy_last = torch.from_numpy(np.argsort(greedy_S, kind="stable"))
        batch = replace(batch, last_tokens_S=batch.last_tokens_S[greedy_last])
        return self._llama.forward_and_choose(batch, self._kv, num_greedy=int(greedy_S.sum()))

    def _to_device(self, step: StepInput) -> Batch:
        query_lens_B = np.diff(step.query_starts_B1)
        last_tokens_S = step.query_starts_B1[step.sample_rows_S + 1] - 1
        return Batch(
            token_ids_T=self._tensor(step.token_ids_T),
            positions_T=self._tensor(step.positions_T),
            slot_mapping_T=self._tensor(step.slot_mapping_T),
            block_tables_BM=self._tensor(step.block_tables_BM),
            seq_lens_B=self._tensor(step.seq_lens_B),
            query_starts_B1=self._tensor(step.query_starts_B1),
            last_tokens_S=self._tensor(last_tokens_S),
            num_decodes=step.num_decodes,
            max_query_len=int(query_lens_B.max()),
            max_seq_len=int(step.seq_lens_B.max()),
        )

    def _tensor(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        # torch warns of arrays that it may not write to, as slices of a frozen buffer are.
        array = array if array.flags.writeable else array.copy()
        return torch.from_numpy(array).to(self._device)

    def _peak_bytes(self) -> int:
        """The most memory that the allocator held during the largest step, weights included."""
        torch.cuda.reset_peak_memory_stats(self._device)
        kv = kv_cache.allocate(self._layout, num_blocks=1, device=self._device)
        rows = self._config.max_num_seqs
        row_len = min(self._config.max_num_batched_tokens // rows, self._layout.block_size)
        num_tokens = self._config.max_num_batched_tokens
        # Every row reads the one block, and all tokens are written there: memory is what counts.
        starts = np.minimum(np.arange(rows + 1) * row_len, num_tokens).astype(np.int32)
        slots = np.arange(num_tokens) % self._layout.block_size
        batch = Batch(
            token_ids_T=self._tensor(np.zeros(num_tokens, np.int64)),
            positions_T=self._tensor(slots),
            slot_mapping_T=self._tensor(slots),
            block_tables_BM=self._tensor(np.zeros((rows, 1), np.int32)),
            seq_lens_B=self._tensor(np.full(rows, row_len, np.int32)),
            query_starts_B1=self._tensor(starts),
            last_tokens_S=self._tensor(starts[1:].astype(np.int64) - 1),
            num_decodes=0,
            max_query_len=row_len,
            max_seq_len=row_len,
        )
        logits_SV = self._llama.forward(batch, kv)
        if logits_SV is not None:
            logits_SV.double()  # the sampler's largest temporary
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


def pick_device(config: EngineConfig, *, rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU that all share.

    Raises:
        ConfigError: A GPU was asked for and there is none for this rank, or there is one and what
            was asked for runs on CPUs only.
    """
    num_gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus < config.tensor_parallel_size:
        raise ConfigError(
            f"device={config.device!r}, tensor_parallel_size={config.tensor_parallel_size}: each "
            f"rank needs a GPU of its own, {num_gpus} found; set device='cpu' to run without"
        )
    config.check_device("cuda")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device
