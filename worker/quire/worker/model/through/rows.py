"""Tests a loaded model: a sequence must get the same results in a batch as alone."""

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.batch import Batch, Hidden
from quire.kernels.ops import KvCache, ProgramRunner
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError, ConfigError

# S rows that are sampled   V vocabulary

LENGTHS = (5, 11)
"""Prompt lengths of two sequences, each of which is then extended by one token."""
_PART = 4
"""Tokens of the second prompt that are computed before the rest of it."""
_MOST = 0.1
"""The largest difference from rounding, in standard deviations of the logits."""

Row = tuple[int, int, int]
"""A sequence's index, and the range of positions to compute of it."""


def check_rows(
    config: EngineConfig,
    runner: ProgramRunner,
    kv: KvCache,
    *,
    vocab_size: int,
    device: torch.device,
    is_encoder: bool = False,
) -> None:
    """Computes two sequences alone, together, and one of them in chunks.

    Args:
        kv: A cache with room for both; its contents are overwritten.
        is_encoder: Sequences are computed as a whole.

    Raises:
        CheckpointError: Sequences attend to each other's tokens.
        ConfigError: A row's bits depend on the batch, which ``deterministic`` does not allow.
    """
    first, second = LENGTHS
    whole, decodes = (
        [(0, 0, first), (1, 0, second)],
        [(0, first, first + 1), (1, second, second + 1)],
    )
    steps = {
        "alone": [whole[:1], whole[1:], decodes[:1], decodes[1:]],
        "together": [whole, decodes],
        "in parts": [whole[:1], [(1, 0, _PART)], [decodes[0], (1, _PART, second)], decodes[1:]],
    }
    if is_encoder:
        steps = {"alone": [whole[:1], whole[1:]], "together": [whole]}
    logits: dict[str, dict[Row, Tensor]] = {}
    for name, batches in steps.items():
        logits[name] = {}
        for rows in batches:
            hidden = Hidden(torch.arange(len(rows), device=device)) if is_encoder else None
            batch = replace(_batch(rows, kv, vocab_size, device), hidden=hidden)
            out_SV = runner.forward(batch, kv, all_reduce=lambda x: x)
            if hidden is not None:
                assert hidden.values_HC is not None
                out_SV = hidden.values_HC
            for row, out_V in zip(rows, out_SV.float(), strict=True):
                logits[name][row[0], 0, row[2]] = out_V
    for name in [*steps][1:]:
        for row, alone_V in logits["alone"].items():
            if torch.equal(logits[name][row], alone_V):
                continue
            spread = alone_V.std() if len(alone_V) > 1 else alone_V.abs()
            difference = (logits[name][row] - alone_V).abs().max() / spread
            if not difference <= _MOST:
                raise CheckpointError(
                    f"{config.model}: transformers' code does not keep sequences of a step apart: "
                    f"logits differ by {difference:.2g} of their standard deviation when computed "
                    f"{name}"
                )
            if config.deterministic:
                raise ConfigError(
                    f"{config.model}: in transformers' code a row's bits depend on the batch; "
                    "deterministic=False (--no-deterministic) allows that"
                )


def _batch(rows: list[Row], kv: KvCache, vocab_size: int, device: torch.device) -> Batch:
    block_size = kv[0][0].shape[1]
    per_sequence = -(-(max(LENGTHS) + 1) // block_size)
    positions, token_ids, slots, starts = [], [], [], [0]
    for sequence, start, end in rows:
        for position in range(start, end):
            positions.append(position)
            token_ids.append((7 + 13 * position + 5 * sequence) % vocab_size)
            slots.append(sequence * per_sequence * block_size + position)
        starts.append(len(positions))

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables = [
        [sequence * per_sequence + block for block in range(per_sequence)] for sequence, *_ in rows
    ]
    return Batch(
        token_ids_T=ints(token_ids).long(),
        positions_T=ints(positions).long(),
        slot_mapping_T=ints(slots).long(),
        block_tables_BM=torch.tensor(tables, dtype=torch.int32, device=device),
        seq_lens_B=ints([end for *_, end in rows]),
        query_starts_B1=ints(starts),
        last_tokens_S=ints(starts[1:]) - 1,
        num_decodes=sum(end - start == 1 for _, start, end in rows),
        max_query_len=max(end - start for _, start, end in rows),
        max_seq_len=max(end for *_, end in rows),
    )


def num_blocks(block_size: int) -> int:
    """The number of KV blocks that `check_rows` needs."""
    return len(LENGTHS) * -(-(max(LENGTHS) + 1) // block_size)
