"""The device sampler, by its kernels' twins on a CPU, against the host sampler."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.worker.rank.sampling.device import DeviceSampler
from quire.worker.rank.sampling.draw import sample
from quire.worker.rank.staging import ALIGNMENT, Array, pack, packed_bytes, stage, unpack
from quire.worker.step.sampling_batch import Edits

SAMPLER = DeviceSampler(torch.device("cpu"))


def mixed(driver: Any, num_rows: int, vocab_size: int, *, seed: int) -> Any:
    """Sampling parameters with every kind of limit and edit, some on one row."""
    rng = np.random.default_rng(seed)
    edits = {}
    for row in range(0, num_rows, 2):
        changes: dict[str, Any] = {}
        if row % 4 == 0:
            biased = rng.permutation(vocab_size)[:5]
            bias = rng.choice([-np.inf, 2.5, -1.5], 5).astype(np.float32)
            changes |= {"biased_ids_A": biased, "bias_A": bias}
        if row % 3 == 0:
            seen = rng.permutation(vocab_size)[: vocab_size // 2]
            changes |= {
                "presence": float(rng.choice([0.0, 0.4, -0.3])),
                "frequency": float(rng.choice([0.0, 0.13])),
                "repetition": float(rng.choice([1.0, 1.3, 0.7])),
                "seen_ids_E": seen,
                "seen_counts_E": rng.integers(0, 5, len(seen)).astype(np.int32),
            }
        if row % 10 == 0:
            words = -(-vocab_size // 32)
            changes["mask_W"] = rng.integers(-(2**31), 2**31, words).astype(np.int32)
        if changes:
            edits[row] = Edits(**changes)
    num_logprobs = rng.choice([-1, 0, 3], num_rows)
    asked = {
        int(row): tuple(rng.permutation(vocab_size)[: rng.integers(1, 9)].tolist())
        for row in np.flatnonzero(num_logprobs >= 0)[: 5 * (seed % 3)]
    }
    return driver.sampling(
        num_rows,
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7], num_rows),
        top_k=rng.choice([0, 0, 1, 3, 40], num_rows),
        top_p=rng.choice([1.0, 0.95, 0.7003], num_rows),
        min_p=rng.choice([0.0, 0.0503], num_rows),
        seed=rng.integers(0, 2**62, num_rows),
        position=rng.integers(0, 2**31, num_rows),
        num_logprobs=num_logprobs,
        edits=edits,
        asked=asked or None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_logprobs_are_those_of_the_engines_sampler(
    seed: int, dtype: torch.dtype, driver: Any
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 300, generator=rng) * 3
    logits[::5] = (logits[::5] * 2).round() / 2  # ties
    logits = logits.to(dtype)
    batch = mixed(driver, 40, 300, seed=seed)
    want = sample(logits.float(), batch)
    hidden = torch.randn(3, 8, generator=rng)
    got = SAMPLER.sample(logits.clone(), batch, hidden).wait()
    assert got.hidden_HC is not None
    assert got.hidden_HC.tolist() == hidden.tolist()
    assert got.token_ids_S.tolist() == want.token_ids_S.tolist()
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine is not None
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-12)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-12)


def test_a_step_without_requests_for_logprobs_has_none(driver: Any) -> None:
    logits = torch.randn(3, 20)
    output = SAMPLER.sample(logits, driver.sampling(3)).wait()
    assert (output.logprobs, output.hidden_HC) == ((), None)
    assert output.token_ids_S.tolist() == logits.argmax(dim=1).tolist()
    assert len(SAMPLER.sample(logits[:0], driver.sampling(0)).wait().token_ids_S) == 0


def test_arrays_travel_together_and_arrive_as_they_were() -> None:
    rng = np.random.default_rng(0)
    arrays: list[Array] = [
        rng.integers(0, 9, 5),
        rng.integers(0, 9, (3, 7)).astype(np.int32),
        np.zeros((2, 0), np.int32),
        rng.random(3).astype(np.float32),
        rng.integers(0, 9, (6, 8)).astype(np.int32)[:, ::2],
    ]
    buffer = torch.empty(packed_bytes(arrays), dtype=torch.uint8)
    pack(arrays, buffer)
    for array, tensor in zip(arrays, unpack(arrays, buffer), strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert (tensor.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
    frozen = np.arange(4)
    frozen.setflags(write=False)
    assert stage([frozen], torch.device("cpu"))[0].tolist() == [0, 1, 2, 3]
