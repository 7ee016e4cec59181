import numpy as np
import pytest
from tests.prepared import prepared

from quire.worker.blocks.events import EventLog
from quire.worker.cache.block_pool import BlockPool
from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import Sequence
from quire.worker.engine.step_input import StepInputs
from quire.worker.request.sampling_params import SamplingParams


@pytest.fixture
def scheduler() -> Scheduler:
    pool = BlockPool(num_blocks=12, block_size=4, log=EventLog(epoch=0))
    return Scheduler(pool=pool, max_num_seqs=4, max_num_batched_tokens=9)


def make_sequence(prompt: list[int], params: SamplingParams) -> Sequence:
    return Sequence(
        prepared("a", prompt, sampling=params),
        seed=params.seed or 0,
        max_tokens=params.max_tokens or 0,
        eos_token_ids=(1,),
        block_size=4,
        chain=None,
    )


def test_a_decode_a_prompts_last_token_and_a_chunk_are_laid_out_as_the_contract_says(
    scheduler: Scheduler,
) -> None:
    decode = make_sequence([10, 11, 12, 13], SamplingParams(max_tokens=9, seed=7, top_k=3))
    prompt = make_sequence(
        [20, 21, 22, 23, 24, 25], SamplingParams(max_tokens=9, seed=8, temperature=0, logprobs=2)
    )
    long = make_sequence([30 + index for index in range(20)], SamplingParams(max_tokens=2))
    for seq in (decode, prompt, long):
        scheduler.add(seq)
    first = scheduler.schedule()  # 4 tokens of the first, 5 of the second.
    inputs = StepInputs(block_size=4)
    whole = inputs.build(first)
    assert whole.query_starts_B1.tolist() == [0, 4, 9]
    assert whole.samples_S.tolist() == [3]
    scheduler.submitted(first)
    scheduler.finished()
    scheduler.append_token(decode, 14)

    step = inputs.build(scheduler.schedule())
    assert step.num_decodes == 2
    assert step.token_ids_T.tolist() == [14, 25, *range(30, 37)]
    assert step.positions_T.tolist() == [4, 5, *range(7)]
    # The first has blocks 0 and 3, the second 1 and 2, the third 4 and 5.
    assert step.block_tables_BM.tolist() == [[0, 3], [1, 2], [4, 5]]
    assert step.slot_mapping_T.tolist() == [12, 9, 16, 17, 18, 19, 20, 21, 22]
    assert step.seq_lens_B.tolist() == [5, 6, 7]
    assert step.query_starts_B1.tolist() == [0, 1, 2, 9]
    assert step.samples_S.tolist() == [0, 1]

    sampling = step.sampling
    assert sampling.temperature_S.tolist() == [1, 0]
    assert sampling.top_p_S.tolist() == [1, 1]
    assert sampling.top_k_S.tolist() == [3, 0]
    assert sampling.min_p_S.tolist() == [0, 0]
    assert sampling.seed_S.tolist() == [7, 8]
    assert sampling.position_S.tolist() == [5, 6]
    assert sampling.num_logprobs_S.tolist() == [-1, 2]
    assert sampling.adjustments is None

    longs = (step.token_ids_T, step.positions_T, step.slot_mapping_T, sampling.position_S)
    assert {array.dtype for array in longs} == {np.dtype(np.int64)}
    ints = (step.block_tables_BM, step.seq_lens_B, step.query_starts_B1, step.samples_S)
    assert {array.dtype for array in ints} == {np.dtype(np.int32)}
