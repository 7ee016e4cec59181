"""Greedy rows beside others, against the sampler on everybody's logits."""

import numpy as np
import torch
from tests.steps import adjusting, banning

from quire.worker.api.arrays import Longs
from quire.worker.model.tensor_parallel import TensorParallel
from quire.worker.sampling.draw import sample
from quire.worker.sampling.greedy import edits_of, greedy_rows, sample_beside
from quire.worker.step.messages import StepOutput
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
    assert np.flatnonzero(greedy_rows(BATCH)).tolist() == [0, 2, 4, 6]


def test_tokens_and_logprobs_are_those_of_the_sampler_on_all_logits() -> None:
    greedy_S = greedy_rows(BATCH)
    adjusted = LOGITS[greedy_S]
    edits = edits_of(BATCH, greedy_S)
    assert edits is not None
    assert edits.biased_starts_G1.tolist() == [0, 0, 0, 1, 1]
    assert edits.seen_starts_G1.tolist() == [0, 0, 0, 0, 1]
    assert edits.mask_of_G.tolist() == [-1] * 4
    adjusted[2, edits.biased_ids_A] += edits.bias_A
    repeated = adjusted[3, edits.seen_ids_E]
    assert (repeated > 0).all()
    adjusted[3, edits.seen_ids_E] = repeated / edits.repetition_G[3]
    token_ids = adjusted.argmax(-1).numpy()
    logits = LOGITS[~torch.from_numpy(greedy_S)]
    beside = sample_beside((logits, token_ids), BATCH, greedy_S)
    expected = sample(LOGITS, BATCH)
    assert beside.token_ids_S.tolist() == expected.token_ids_S.tolist()
    assert beside.logprobs == expected.logprobs
    assert beside.token_ids_S[4] != BEST


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


def test_a_batch_of_greedy_rows_alone_is_not_sampled() -> None:
    every = np.ones(7, np.bool_)
    output = sample_beside((LOGITS[:0], np.arange(7)), BATCH, every)
    assert output == StepOutput(output.token_ids_S)
    assert output.token_ids_S.tolist() == list(range(7))
