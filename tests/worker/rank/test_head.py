"""Sampling without the logits that the model skips, against the sampler on all logits."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.steps import adjusting, banning

from quire.worker.rank.collectives import TensorParallel
from quire.worker.rank.sampling.draw import sample
from quire.worker.rank.sampling.head import HeadRows, edits_of, head_rows, sample_beside
from quire.worker.request.arrays import Ints, Longs
from quire.worker.step.sampling_batch import Edits, SamplingBatch

LOGITS = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
BEST = int(LOGITS[4].argmax())
REPEATED = Edits(
    repetition=3.0,
    seen_ids_E=np.array([int(LOGITS[6].argmax())]),
    seen_counts_E=np.zeros(1, np.int32),
)
BATCH = SamplingBatch(
    temperature_S=np.array([0, 0.8, 0, 0, 0, 1.5, 0], np.float32),
    top_p_S=np.ones(7, np.float32),
    top_k_S=np.array([0, 5, 0, 0, 0, 0, 0], np.int32),
    min_p_S=np.zeros(7, np.float32),
    seed_S=np.arange(7),
    position_S=np.arange(7) + 100,
    num_logprobs_S=np.array([-1, -1, -1, 2, -1, 0, -1], np.int32),
    adjustments=adjusting({4: banning([BEST]), 6: REPEATED}, num_samples=7),
    asked={3: (BEST, 7, 49), 5: (0,)},
)


def test_greedy_rows_are_those_without_any_use_for_logits() -> None:
    rows = head_rows(BATCH)
    assert rows is not None
    assert rows.greedy_G.tolist() == [0, 2, 4, 6]
    assert rows.others_L.tolist() == [1, 3, 5]
    assert rows.wanted is None


def test_a_lone_greedy_row_needs_no_logits() -> None:
    rows = head_rows(BATCH.take(np.array([0, 1])))
    assert rows is not None
    assert rows.greedy_G.tolist() == [0]


def test_tokens_and_logprobs_are_those_of_the_sampler_on_all_logits() -> None:
    rows = head_rows(BATCH)
    assert rows is not None
    adjusted = LOGITS[rows.greedy_G]
    edits = edits_of(BATCH, rows)
    assert edits is not None
    assert edits.biased_starts_G1.tolist() == [0, 0, 0, 1, 1]
    assert edits.seen_starts_G1.tolist() == [0, 0, 0, 0, 1]
    assert edits.mask_of_G.tolist() == [-1] * 4
    adjusted[2, edits.biased_ids_A] += edits.bias_A
    repeated = adjusted[3, edits.seen_ids_E]
    assert (repeated > 0).all()
    adjusted[3, edits.seen_ids_E] = repeated / edits.repetition_G[3]
    token_ids = adjusted.argmax(-1).numpy()
    beside = sample_beside((LOGITS[rows.others_L], token_ids), BATCH, rows)
    expected = sample(LOGITS, BATCH)
    assert beside.token_ids_S.tolist() == expected.token_ids_S.tolist()
    assert beside.logprobs == expected.logprobs
    assert beside.token_ids_S[4] != BEST


VOCAB = 200
TEMPERATURES = st.sampled_from([0.0, 1.0, 3.0])
SAMPLES = st.lists(
    st.tuples(
        TEMPERATURES,
        st.sampled_from([-1, -1, 0, 2]),
        st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=120),
        st.sets(st.integers(0, VOCAB - 1), max_size=5),
    ),
    min_size=1,
    max_size=12,
)


@given(samples=SAMPLES, seed=st.integers(0, 99))
def test_what_is_not_computed_is_not_looked_at(
    samples: list[tuple[float, int, set[int] | None, set[int]]], seed: int
) -> None:
    """Unwanted columns hold NaN, and greedy rows have no logits."""
    num = len(samples)
    logits = torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed))
    edits = {}
    for row, (_, _, allowed, seen) in enumerate(samples):
        mask_W = None if allowed is None else _words(allowed)
        ids = np.array(sorted(seen), np.int64)
        counts = np.ones(len(ids), np.int32)
        if allowed is not None or seen:
            edits[row] = Edits(
                mask_W=mask_W, seen_ids_E=ids, seen_counts_E=counts, presence=2.0, repetition=1.5
            )
    batch = SamplingBatch(
        temperature_S=np.array([each[0] for each in samples], np.float32),
        top_p_S=np.ones(num, np.float32),
        top_k_S=np.zeros(num, np.int32),
        min_p_S=np.zeros(num, np.float32),
        seed_S=np.arange(num),
        position_S=np.arange(num),
        num_logprobs_S=np.array([each[1] for each in samples], np.int32),
        adjustments=adjusting(edits, num_samples=num),
    )
    expected = sample(logits, batch)
    rows = head_rows(batch)
    if rows is None:
        return
    computed = logits[rows.order_S]
    if rows.wanted is not None:
        masks = rows.wanted.mask_KW.numpy().view(np.uint32)
        for row, mask in enumerate(rows.wanted.mask_of_S.tolist()):
            if mask >= 0:
                unwanted = np.repeat(masks[mask] == 0, 32)[:VOCAB]
                unwanted = np.pad(unwanted, (0, VOCAB - len(unwanted)), constant_values=True)
                computed[row, torch.from_numpy(unwanted)] = torch.nan
    token_ids_G = _chosen(computed[num - rows.num_greedy :], batch, rows)
    found = sample_beside((computed[: num - rows.num_greedy].clone(), token_ids_G), batch, rows)
    assert found.token_ids_S.tolist() == expected.token_ids_S.tolist()
    assert (found.logprobs or (None,) * num) == (expected.logprobs or (None,) * num)
    assert found.broken_rows == expected.broken_rows == ()


def _words(token_ids: set[int]) -> Ints:
    bits = np.zeros(VOCAB + -VOCAB % 32, np.uint8)
    bits[sorted(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _chosen(logits_GV: torch.Tensor, batch: SamplingBatch, rows: HeadRows) -> Longs:
    """The greedy choice, as the native library makes it from the result of `edits_of`."""
    edits = edits_of(batch, rows)
    chosen = []
    for row, logits_V in enumerate(logits_GV.numpy()):
        logits_V = logits_V.copy()
        if edits is not None:
            begin, end = edits.seen_starts_G1[row : row + 2].tolist()
            for token in edits.seen_ids_E[begin:end].tolist():
                repetition = np.float32(edits.repetition_G[row])
                logit = np.float32(logits_V[token])
                logit = logit / repetition if logit > 0 else logit * repetition
                logits_V[token] = logit - np.float32(edits.presence_G[row])
            mask = int(edits.mask_of_G[row])
            if mask >= 0:
                bits = np.unpackbits(edits.mask_KW[mask].numpy().view(np.uint8), bitorder="little")
                allowed = np.pad(bits, (0, VOCAB))[:VOCAB] > 0
                logits_V[~allowed] = -np.inf
        chosen.append(int(np.nanargmax(logits_V)))
    return np.array(chosen, np.int64)


def test_the_greatest_of_several_ranks_is_the_first_of_equals() -> None:
    class OfThree(TensorParallel):
        size = 3

        def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
            # Ranges of 10 columns: 0 to 2, 3 to 5, 6 to 9.
            minus_inf = float("-inf")
            rank_1 = torch.tensor([[5.0, 2.0], [9.0, 0.0], [minus_inf, 0.0]])
            rank_2 = torch.tensor([[5.0, 0.0], [9.5, 3.0], [-7.0, 1.0]])
            return [x, rank_1, rank_2]

    mine = torch.tensor([[4.0, 1.0], [9.0, 1.0], [float("-inf"), 0.0]])
    chosen: Longs | None = OfThree().gather_greatest(mine, num_columns=10)
    assert chosen is not None
    assert chosen.tolist() == [5, 9, 7]


def test_a_row_is_broken_with_and_without_logits_where_the_greatest_is_infinite() -> None:
    logits = LOGITS[:5].clone()
    logits[0, 3] = torch.inf
    logits[1] = -torch.inf
    logits[2] = torch.nan
    logits[3, 3] = -torch.inf
    batch = replace(BATCH, adjustments=None, asked=None).take(np.array([0, 2, 4, 6, 0]))
    values, columns = torch.where(logits.isnan(), -torch.inf, logits).max(-1)
    greatest = torch.stack([values, columns.float()], 1)
    chosen = TensorParallel().gather_greatest(greatest, num_columns=50)
    assert chosen is not None
    sampled = sample(logits, batch)
    assert sampled.broken_rows == tuple(np.flatnonzero(chosen < 0).tolist()) == (0, 1, 2)
    assert sampled.token_ids_S[3:].tolist() == chosen[3:].tolist()


def test_a_batch_of_greedy_rows_alone_is_not_sampled() -> None:
    every = HeadRows(np.arange(7), num_greedy=7, wanted=None)
    output = sample_beside((LOGITS[:0], np.arange(7)), BATCH, every)
    assert output.token_ids_S.tolist() == list(range(7))
    assert not output.logprobs
    assert not output.broken_rows
    assert output.hidden_HC is None
