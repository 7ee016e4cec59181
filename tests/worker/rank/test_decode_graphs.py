"""Decodes through CUDA graphs, with a stand-in that runs the captured function again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests import peft_files
from transformers import LlamaForCausalLM

from quire.kernels.batch import Batch
from quire.kernels.native import library as native
from quire.kernels.shared_prefix import find_shared
from quire.worker.parts.adapters.store import AdapterStore
from quire.worker.rank.gpu_profile import largest_steps, warm_up_steps
from quire.worker.rank.graphs import MAX_PARTS, Bucket, DecodeGraphs, make_buckets
from quire.worker.rank.late_tokens import LateTokens
from quire.worker.request.config import EngineConfig

LENGTHS = [1, 2, 15, 16, 17, 40, 100, 33, 7]


class Again:
    """A stand-in for a CUDA graph, whose replay calls the captured function again."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def replay(self) -> None:
        self._function()


@pytest.fixture
def runner(runner_of: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(native, "library", lambda: None)  # PyTorch takes rows of length 0.
    return runner_of(tiny_llama)


def logits_of(runner: Any, batch: Batch) -> torch.Tensor:
    return cast("torch.Tensor", runner._model.forward(batch, runner._kv))


def graphs_of(runner: Any, buckets: list[Bucket], *, vocab_size: int | None = 320) -> DecodeGraphs:
    graphs = DecodeGraphs(
        lambda batch: logits_of(runner, batch) if vocab_size else None,
        buckets=buckets,
        block_size=16,
        spare_block=127,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        capture=Again,
    )
    for bucket in reversed(graphs.buckets):
        graphs.capture(bucket)
    return graphs


def decodes(driver: Any, row: Any, lengths: list[int]) -> Any:
    """A step of decodes of these lengths; `prefill` computes the tokens before."""
    rng = np.random.default_rng(1)
    rows = [
        row(rng.integers(3, 300, n).tolist(), range(index * 8, index * 8 + 8), n - 1)
        for index, n in enumerate(lengths)
    ]
    return rows, driver.step(rows)


def prefill(runner: Any, driver: Any, row: Any, rows: list[Any]) -> None:
    for each in rows:
        if each.done:
            runner.forward(driver.step([row(each.token_ids[: each.done], each.blocks)]))


@pytest.mark.parametrize("num_rows", range(1, len(LENGTHS) + 1))
def test_a_graph_gives_the_logits_of_the_same_step_without_one(
    num_rows: int, runner: Any, driver: Any, row: Any
) -> None:
    graphs = graphs_of(runner, [Bucket(n, length) for n in (1, 2, 4, 9) for length in (64, 512)])
    rows, step = decodes(driver, row, LENGTHS[:num_rows])
    prefill(runner, driver, row, rows)
    bucket = graphs.bucket_of(step)
    assert bucket is not None
    assert num_rows <= bucket.num_rows <= max(1, 2 * num_rows)
    logits = graphs.run(step, bucket)
    assert logits is not None
    assert torch.equal(logits, runner.forward(step))


def test_graphs_with_and_without_adapters(
    runner_of: Any,
    tiny_llama: Path,
    driver: Any,
    row: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    runner = runner_of(tiny_llama, enable_lora=True, max_loras=3)
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    folders = [peft_files.write(tmp_path / f"{n}", model, seed=n) for n in range(2)]
    loads = tuple((slot, AdapterStore().put(each)) for slot, each in enumerate(folders, 1))
    buckets = make_buckets(max_num_seqs=4, max_model_len=256, with_adapters=True)
    assert {each.has_adapters for each in buckets} == {False, True}
    graphs = graphs_of(runner, buckets)
    rows, plain = decodes(driver, row, [17, 40, 33])
    prefill(runner, driver, row, rows)
    answers = []
    for slots in ([], [1, -1, 2], [2, 2, 1], [-1, 1, 1]):
        step = replace(plain, adapter_slots_A=np.array(slots, np.int32))
        runner.execute(replace(step, adapter_loads=loads))
        bucket = graphs.bucket_of(step)
        assert bucket is not None
        assert bucket.has_adapters == bool(slots)
        logits = graphs.run(step, bucket)
        assert logits is not None
        assert torch.equal(logits, runner.forward(step))
        answers.append(logits.clone())
    assert torch.equal(answers[0][1], answers[1][1])  # The row without an adapter.
    assert torch.equal(answers[2][2], answers[3][2])
    for one, other in [(0, 1), (1, 2), (0, 2)]:
        assert not torch.equal(answers[one][0], answers[other][0])


def test_a_token_that_the_step_before_sampled_is_put_in_on_the_device(
    runner: Any, driver: Any, row: Any
) -> None:
    graphs = graphs_of(runner, [Bucket(4, 512)])
    rows, known = decodes(driver, row, [17, 40, 33])
    prefill(runner, driver, row, rows)
    token_ids = known.token_ids_T.copy()
    late = LateTokens(
        sampled_S=torch.tensor([5, int(token_ids[2]), 7, int(token_ids[0])]),
        tokens_L=np.array([0, 2], np.int32),
        rows_L=np.array([3, 1], np.int32),
    )
    token_ids[late.tokens_L] = 0
    unknown = replace(known, token_ids_T=token_ids)
    want = runner.forward(known)
    by_graph = graphs.run(unknown, Bucket(4, 512), late)
    assert by_graph is not None
    assert torch.equal(by_graph, want)
    runner._sampled_S = late.sampled_S
    step = replace(unknown, late_tokens_L=late.tokens_L, late_rows_L=late.rows_L)
    assert torch.equal(runner.forward(step), want)
    assert token_ids[0] == token_ids[2] == 0, "the step's own arrays stay as they were"


def test_what_an_earlier_step_left_in_the_buffers_does_not_matter(
    runner: Any, driver: Any, row: Any
) -> None:
    graphs = graphs_of(runner, [Bucket(4, 512)])
    rows, large = decodes(driver, row, [100, 40, 33, 17])
    prefill(runner, driver, row, rows)
    small = driver.step(rows[1:3])
    graphs.run(large, Bucket(4, 512))
    before = [cache.clone() for pair in runner._kv for cache in pair]
    logits = graphs.run(small, Bucket(4, 512))
    assert logits is not None
    assert torch.equal(logits, runner.forward(small))
    # Padding rows write to the spare block, the last one, and nowhere else.
    for was, now in zip(before, (cache for pair in runner._kv for cache in pair), strict=True):
        assert torch.equal(was[:127].nan_to_num(), now[:127].nan_to_num())


def test_steps_that_are_more_than_decodes_have_no_graph(runner: Any, driver: Any, row: Any) -> None:
    graphs = graphs_of(runner, [Bucket(2, 512)])
    one = row([5, 6, 7], range(8), 2)
    chunk = row([5, 6, 7], range(8, 16))
    unsampled = row([5, 6, 7], range(8, 16), 2, samples=False)
    assert graphs.bucket_of(driver.step([one])) == Bucket(2, 512)
    assert graphs.bucket_of(driver.step([one, chunk])) is None
    assert graphs.bucket_of(driver.step([one, unsampled])) is None
    assert graphs.bucket_of(driver.step([one] * 3)) is None
    wanting = replace(driver.step([one]), hidden_rows_H=np.zeros(1, np.int32))
    assert graphs.bucket_of(wanting) is None


def test_a_rank_without_logits_replays_too(runner: Any, driver: Any, row: Any) -> None:
    graphs = graphs_of(runner, [Bucket(1, 512)], vocab_size=None)
    _, step = decodes(driver, row, [9])
    assert graphs.run(step, Bucket(1, 512)) is None


@pytest.mark.parametrize("max_num_seqs", [1, 3, 32, 33, 128, 256, 1000])
@pytest.mark.parametrize("max_model_len", [100, 1024, 8192, 131072])
def test_every_short_step_of_any_size_has_a_bucket_not_much_larger(
    max_num_seqs: int, max_model_len: int
) -> None:
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    assert len(set(buckets)) == len(buckets) <= 120
    for rows in range(1, max_num_seqs + 1):
        fits = [b for b in buckets if b.num_rows >= rows and b.max_seq_len >= 100]
        assert min(fits).num_rows < max(2 * rows, rows + 32)
    assert max(b.num_rows for b in buckets) == max_num_seqs
    assert max(b.max_seq_len for b in buckets) == max_model_len
    assert all(b.num_rows * -(-b.max_seq_len // 256) <= MAX_PARTS for b in buckets)


def test_the_largest_steps_are_steps_that_a_runner_takes(runner: Any, tiny_llama: Path) -> None:
    config = EngineConfig(model=tiny_llama, max_num_seqs=6, max_num_batched_tokens=50)
    chunks, decoding = largest_steps(config, block_size=16, max_model_len=512)
    assert len(chunks.token_ids_T) == 50
    assert len(decoding.seq_lens_B) == decoding.num_decodes == 6
    assert decoding.seq_lens_B.max() == 512
    assert len(runner.execute(decoding).token_ids_S) == 6
    assert len(runner.execute(chunks).token_ids_S) == 50  # All but the rows' last ones.


@pytest.mark.parametrize("max_num_seqs", [1, 2, 6])
@pytest.mark.parametrize("max_model_len", [8, 512])
def test_the_warm_up_is_steps_that_a_runner_takes(
    max_num_seqs: int, max_model_len: int, runner: Any, tiny_llama: Path
) -> None:
    config = EngineConfig(model=tiny_llama, max_num_seqs=max_num_seqs, max_num_batched_tokens=6)
    mixed, behind, decodes = warm_up_steps(config, block_size=16, max_model_len=max_model_len)
    for step in (mixed, behind, decodes):
        rows = min(2, max_num_seqs)
        assert len(runner.execute(step).token_ids_S) == len(step.seq_lens_B) == rows
    assert decodes.num_decodes == rows
    assert len(decodes.late_tokens_L) == rows
    assert mixed.num_decodes == behind.num_decodes == rows - 1
    if rows == 2:
        assert behind.seq_lens_B.max() == max_model_len
        tables, lens = decodes.block_tables_BM, decodes.seq_lens_B
        shared = find_shared(tables, lens, block_size=16, group=2, min_saved_tokens=1)
        assert (shared is not None) == (max_model_len > 256)
