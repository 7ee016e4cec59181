"""One rank's share of a model: runs a step and gathers the logits of all ranks on rank 0."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.batch import Batch, GreedyEdits, WantedColumns
from quire.kernels.ops import KvCache, ProgramRunner
from quire.worker.rank.collectives import TensorParallel
from quire.worker.request.arrays import Longs

# S rows that are sampled   G of these that are greedy   V vocabulary


class Model:
    """The program of one rank of ``tp.size`` ranks."""

    def __init__(self, runner: ProgramRunner, *, vocab_size: int, tp: TensorParallel) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._tp = tp

    @property
    def chooses(self) -> bool:
        """Whether `forward_and_choose` is supported."""
        return self._runner.chooses

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvCache) -> Tensor | None:
        """Computes the step's tokens and writes their KV.

        Returns the logits ``[S, V]`` on rank 0, ``None`` on the others: float32 on a CPU; on a GPU
        in the model's type, in which they were computed.
        """
        logits = self._runner.forward(batch, kv, all_reduce=self._tp.all_reduce)
        return self._tp.gather_columns(logits, num_columns=self._vocab_size)

    @torch.inference_mode()
    def forward_and_choose(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        num_greedy: int,
        edits: GreedyEdits | None = None,
        wanted: WantedColumns | None = None,
    ) -> tuple[Tensor, Longs] | None:
        """Runs `forward`, but chooses the tokens of the last ``num_greedy`` rows greedily.

        Returns the logits of the other rows, and the tokens of these: the first column with the
        greatest logit, or -1 if all are NaN. Their logits are never stored: 128 rows of a
        vocabulary of 32,000 would be 16 MB to write and to read again. ``edits``: changes to the
        logits of these rows. ``wanted``: the columns to compute.
        """
        greatest_G2 = torch.empty(num_greedy, 2)
        first = self._tp.rank * self._vocab_size // self._tp.size
        logits = self._runner.forward(
            batch,
            kv,
            all_reduce=self._tp.all_reduce,
            greatest_G2=greatest_G2,
            edits=None if edits is None else replace(edits, first_column=first),
            wanted=None if wanted is None else replace(wanted, first_column=first),
        )
        token_ids = self._tp.gather_greatest(greatest_G2, num_columns=self._vocab_size)
        gathered = self._tp.gather_columns(logits, num_columns=self._vocab_size)
        return None if gathered is None or token_ids is None else (gathered, token_ids)
