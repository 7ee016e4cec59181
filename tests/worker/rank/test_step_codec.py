"""Steps and outputs are read from shared memory as they were written."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.worker.rank.codec import StepSlots, all_slots_bytes, pack, slot_bytes, unpack
from quire.worker.request.config import EngineConfig
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.step.sampling_batch import SAMPLE_TYPES, Adjustments, Edits, SamplingBatch

CONFIG = EngineConfig(model=Path("none"), max_num_seqs=5, max_num_batched_tokens=33, block_size=4)
MAX_MODEL_LEN = 50
OFFSET = 4096
OUTPUT = StepOutput(np.array([6]))


Ends = tuple[StepSlots, StepSlots]


@pytest.fixture(params=[True, False], ids=["shared", "apart"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """The engine's end of the slots and a rank's."""
    size = slot_bytes(CONFIG, max_model_len=MAX_MODEL_LEN)
    if not request.param:
        yield StepSlots(size), StepSlots(size)
        return
    fd = os.memfd_create("test")
    os.ftruncate(fd, OFFSET + all_slots_bytes(size))
    yield (
        StepSlots(size, shared_fd=fd, offset=OFFSET),
        StepSlots(size, shared_fd=fd, offset=OFFSET),
    )
    os.close(fd)


def sent(message: object | None) -> Any:
    """The message as the rank receives it."""
    return unpack(pack(message))


def random_step(
    seed: int, *, tokens: int, rows: int, sampled: int, late: int, blocks: int
) -> StepInput:
    rng = np.random.default_rng(seed)

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**31, shape).astype(np.int32)

    def longs(*shape: int) -> np.ndarray:
        return rng.integers(0, 2**62, shape)

    def floats(*shape: int) -> np.ndarray:
        return rng.random(shape).astype(np.float32)

    return StepInput(
        token_ids_T=longs(tokens),
        positions_T=longs(tokens),
        slot_mapping_T=longs(tokens),
        block_tables_BM=ints(rows, blocks),
        seq_lens_B=ints(rows),
        query_starts_B1=ints(rows + 1),
        num_decodes=int(rng.integers(rows + 1)),
        samples_S=ints(sampled),
        sampling=SamplingBatch(
            temperature_S=floats(sampled),
            top_p_S=floats(sampled),
            top_k_S=ints(sampled),
            min_p_S=floats(sampled),
            seed_S=longs(sampled),
            position_S=longs(sampled),
            num_logprobs_S=ints(sampled),
        ),
        late_tokens_L=ints(late),
        late_rows_L=ints(late),
    )


def assert_equal(one: object, other: object) -> None:
    for name in one.__slots__:  # type: ignore[attr-defined]
        ours, theirs = getattr(one, name), getattr(other, name)
        if isinstance(ours, np.ndarray):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), name
            assert (ours == theirs).all(), name
        elif isinstance(ours, SamplingBatch | Adjustments):
            assert_equal(ours, theirs)
        else:
            assert ours == theirs


def test_two_steps_of_any_shape_lie_beside_each_other(
    ends: Ends,
) -> None:
    engine, rank = ends
    largest = random_step(1, tokens=33, rows=5, sampled=5, late=5, blocks=13)
    shapes = [
        largest,
        random_step(2, tokens=1, rows=1, sampled=0, late=0, blocks=1),
        random_step(3, tokens=7, rows=3, sampled=2, late=1, blocks=5),
        largest,
    ]
    for number in range(len(shapes) - 1):
        messages = [
            sent(engine.write_step(number + ahead, step))
            for ahead, step in enumerate(shapes[number : number + 2])
        ]
        for ahead, message in enumerate(messages):
            found = rank.read_step(number + ahead, message)
            assert_equal(shapes[number + ahead], found)
            assert found.token_ids_T.flags.writeable


def test_a_message_is_empty_where_slots_are_shared_and_nothing_is_rare() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, all_slots_bytes(4096))
    slots = StepSlots(4096, shared_fd=fd)
    os.close(fd)
    step = random_step(5, tokens=7, rows=3, sampled=2, late=1, blocks=5)
    assert pack(slots.write_step(0, step)) == pack(slots.write_output(0, OUTPUT)) == b""


def with_adjustments(step: StepInput) -> StepInput:
    ids = np.array([7, 9])
    edits = Edits(
        biased_ids_A=ids,
        bias_A=np.array([-np.inf, 2], np.float32),
        seen_ids_E=ids,
        seen_counts_E=np.array([1, 2], np.int32),
        presence=0.5,
        mask_W=np.array([-5, 9], np.int32),
    )
    adjustments = Adjustments.of([(1, edits), (2, Edits())], num_samples=3)
    return replace(step, sampling=replace(step.sampling, adjustments=adjustments))


@pytest.mark.parametrize("asked", [None, {1: (4, 9)}])
@pytest.mark.parametrize("given", [None, [5, -1, 7]])
def test_adjustments_and_known_and_named_tokens_go_with_the_message(
    ends: Ends,
    given: list[int] | None,
    asked: dict[int, tuple[int, ...]] | None,
) -> None:
    engine, rank = ends
    step = with_adjustments(random_step(4, tokens=3, rows=3, sampled=3, late=0, blocks=2))
    if given is not None:
        step = replace(step, sampling=replace(step.sampling, given_S=np.array(given)))
    step = replace(step, sampling=replace(step.sampling, asked=asked))
    assert_equal(step, rank.read_step(0, sent(engine.write_step(0, step))))


def test_hidden_states_and_copies_go_with_the_message(ends: Ends) -> None:
    engine, rank = ends
    step = replace(
        random_step(4, tokens=3, rows=3, sampled=3, late=0, blocks=2),
        hidden_rows_H=np.array([0, 2], np.int32),
        copies_X22=np.array([((0, 5), (1, 2))], np.int32),
    )
    assert_equal(step, rank.read_step(0, sent(engine.write_step(0, step))))
    output = StepOutput(np.arange(3), hidden_HC=np.ones((2, 4), np.float32))
    assert_equal(output, engine.read_output(0, sent(rank.write_output(0, output))))


def test_a_step_may_have_copies_and_no_tokens(ends: Ends) -> None:
    engine, rank = ends
    step = replace(
        random_step(4, tokens=0, rows=0, sampled=0, late=0, blocks=0),
        copies_X22=np.array([((0, 5), (1, 2)), ((1, 0), (0, 3))], np.int32),
    )
    assert_equal(step, rank.read_step(0, sent(engine.write_step(0, step))))
    output = StepOutput(np.empty(0, np.int64))
    assert_equal(output, engine.read_output(0, sent(rank.write_output(0, output))))


def test_slots_of_adapters_are_in_the_slot_and_their_loads_go_with_the_message(ends: Ends) -> None:
    engine, rank = ends
    step = random_step(4, tokens=33, rows=5, sampled=5, late=5, blocks=13)
    slots = np.array([0, -1, 7, 7, 1], np.int32)
    without = replace(step, adapter_slots_A=slots)
    for number, each in enumerate(
        (without, replace(without, adapter_loads=((7, "a" * 64), (1, "b" * 64))), step)
    ):
        assert_equal(each, rank.read_step(number, sent(engine.write_step(number, each))))


def test_every_array_of_a_sampling_batch_has_a_type() -> None:
    assert {*SAMPLE_TYPES, "adjustments", "given_S", "asked"} == set(SamplingBatch.__slots__)


def test_an_output_outlives_its_slot(ends: Ends) -> None:
    engine, rank = ends
    logprobs = (None, TokenLogprobs(5, -0.5, 1, ()))
    message = sent(rank.write_output(1, StepOutput(np.array([4, 5]), logprobs)))
    output = engine.read_output(1, message)
    message = sent(rank.write_output(3, OUTPUT))
    assert (output.token_ids_S.tolist(), output.logprobs) == ([4, 5], logprobs)
    assert engine.read_output(3, message).token_ids_S.tolist() == [6]
