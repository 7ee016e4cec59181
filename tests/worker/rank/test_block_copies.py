"""Block copies of a step, within the cache and between tiers, which precede its computation."""

import functools
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.engine_requests import request, run

from quire.worker.blocks.kv_format import KvFormat
from quire.worker.group_engine import GroupEngine
from quire.worker.rank.copies import BlockCopies, CacheLayout
from quire.worker.rank.executor import make_executor
from quire.worker.rank.host_memory import MIN_SLOTS, num_host_blocks
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.request.errors import ConfigError
from quire.worker.step.messages import Executor, StepInput, StepOutput
from quire.worker.step.sampling_batch import SamplingBatch
from quire.worker.weights.loader import Shard

PROMPT = np.random.default_rng(3).integers(3, 320, 37).tolist()
BLOCKS = [4, 2, 7]


def with_copies(step: StepInput, *copies: tuple[tuple[int, int], tuple[int, int]]) -> StepInput:
    return replace(step, copies_X22=np.array(copies, np.int32))


@pytest.mark.quick_cells("1")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_copy_of_a_cached_block_gives_the_same_tokens(
    num_ranks: int, tiny_llama: Path, config_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_llama, tensor_parallel_size=num_ranks)
    executor, facts = make_executor(config)
    engine, submit, spare = GroupEngine(config, facts, executor), executor.submit, 127
    try:
        expected = run(engine, request("first", PROMPT, max_tokens=8, temperature=0))["first"]
        for source, is_same in ((0, True), (1, False)):
            steps: list[StepInput] = []

            def read_the_copy(step: StepInput, source: int = source, steps: Any = steps) -> None:
                cached = step.block_tables_BM[0].copy()
                step.block_tables_BM[0, 0] = spare
                if not steps:
                    step = with_copies(step, ((0, cached[source]), (0, spare)))
                steps.append(step)
                submit(step)

            monkeypatch.setattr(executor, "submit", read_the_copy)
            found = run(engine, request("again", PROMPT, max_tokens=8, temperature=0))["again"]
            assert found.num_cached_tokens == 32
            assert (found.token_ids == expected.token_ids) == is_same
    finally:
        engine.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "float16", "kv_cache_dtype": "int8"},
        {"model_impl": "transformers", "dtype": "bfloat16"},
        {"block_size": 4},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_blocks_go_to_host_memory_and_come_back(
    options: dict[str, Any], tiny_llama: Path, runner_of: Any, driver_of: Any, row: Any
) -> None:
    runner = runner_of(tiny_llama, kv_transfer=True, **options)
    block_size = options.get("block_size", 16)
    driver = driver_of(block_size)
    prompt = PROMPT[: 2 * block_size + 3]
    runner.execute(driver.step([row(prompt[:-1], BLOCKS)]))
    runner.execute(driver.step([row(prompt[::-1], [9, 10, 11])]))
    last = driver.step([row(prompt, BLOCKS, done=len(prompt) - 1)], num_logprobs=5)
    expected = runner.execute(last)
    kept = [cache[BLOCKS].clone() for pair in runner._kv for cache in pair]
    out = [((0, block), (1, place)) for place, block in enumerate(BLOCKS[:2])]
    over = [((0, 9), (0, BLOCKS[0])), ((0, 10), (0, BLOCKS[1]))]
    assert runner.execute(with_copies(last, *out, *over)).logprobs != expected.logprobs
    # Copies run in order: of the last two only the first restores lost contents.
    back = [(there, here) for here, there in out]
    assert runner.execute(with_copies(last, *back)) == expected
    assert runner.execute(with_copies(last, *over, *back)) == expected
    for cache, whole in zip((c for pair in runner._kv for c in pair), kept, strict=True):
        assert torch.equal(cache[BLOCKS].view(torch.uint8), whole.view(torch.uint8))


def only_copies(*copies: tuple[tuple[int, int], tuple[int, int]]) -> StepInput:
    """A step with copies and no tokens."""
    longs, ints = np.empty(0, np.int64), np.empty(0, np.int32)
    return StepInput(
        token_ids_T=longs,
        positions_T=longs,
        slot_mapping_T=longs,
        block_tables_BM=np.empty((0, 0), np.int32),
        seq_lens_B=ints,
        query_starts_B1=np.zeros(1, np.int32),
        num_decodes=0,
        samples_S=ints,
        sampling=SamplingBatch.filled(0, whole=0, real=0),
        copies_X22=np.array(copies, np.int32).reshape(-1, 2, 2),
    )


def execute(executor: Executor, step: StepInput) -> StepOutput:
    executor.submit(step)
    return executor.result()


@pytest.fixture(scope="module")
def bytes_of_one_rank(
    config_of: Callable[..., Any], tiny_llama: Path, driver: Any, row: Any
) -> Callable[..., tuple[Any, StepOutput]]:
    """Bytes of the first two blocks of `PROMPT` in host memory, on one rank, and the output of its
    last token."""

    @functools.cache
    def make(**options: Any) -> tuple[Any, StepOutput]:
        executor, _ = make_executor(config_of(tiny_llama, kv_transfer=True, **options))
        execute(executor, driver.step([row(PROMPT[:36], BLOCKS)]))
        output = execute(executor, driver.step([row(PROMPT, BLOCKS, done=36)], num_logprobs=5))
        execute(executor, only_copies(((0, BLOCKS[0]), (1, 5)), ((0, BLOCKS[1]), (1, 0))))
        blocks_XC = executor.host_blocks_XC
        assert blocks_XC is not None
        bytes_2C = blocks_XC[[5, 0]].copy()
        executor.close()
        return bytes_2C, output

    return make


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_groups_of_any_number_of_ranks_exchange_blocks(
    num_ranks: int,
    kind: str,
    tiny_llama: Path,
    config_of: Callable[..., Any],
    driver: Any,
    row: Any,
    bytes_of_one_rank: Callable[..., tuple[Any, StepOutput]],
) -> None:
    options = {"kv_cache_dtype": kind} if kind == "int8" else {"dtype": kind}
    bytes_2C, expected = bytes_of_one_rank(**options)
    assert len(np.unique(bytes_2C[0])) > 20
    config = config_of(tiny_llama, kv_transfer=True, tensor_parallel_size=num_ranks, **options)
    executor, _ = make_executor(config)
    try:
        blocks_XC = executor.host_blocks_XC
        assert blocks_XC is not None
        # Blocks that the ranks compute have the same bytes; each of 4 ranks has one of 2 KV heads.
        execute(executor, driver.step([row(PROMPT[:36], BLOCKS)]))
        output = execute(executor, only_copies(((0, BLOCKS[0]), (1, 7)), ((0, BLOCKS[1]), (1, 8))))
        assert len(output.token_ids_S) == 0
        assert (blocks_XC[[7, 8]] == bytes_2C).all()
        # One rank's bytes work for these ranks too, in blocks that were never written.
        blocks_XC[[2, 31]] = bytes_2C
        execute(executor, only_copies(((1, 2), (0, 20)), ((1, 31), (0, 21))))
        execute(executor, driver.step([row(PROMPT[:36], [20, 21, 22], done=32)]))
        last = driver.step([row(PROMPT, [20, 21, 22], done=36)], num_logprobs=5)
        assert execute(executor, last).logprobs == expected.logprobs
    finally:
        executor.close()


# N blocks of the cache   T tokens   K heads of a rank   D channels


@pytest.mark.parametrize("is_head_major", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn],
    ids=lambda dtype: str(dtype)[6:],
)
def test_bytes_outside_are_by_layer_k_and_v_and_head(
    dtype: torch.dtype, size: int, is_head_major: bool
) -> None:
    num_layers, num_heads, num_blocks, num_slots, width = 3, 4, 7, 9, 18
    rng = np.random.default_rng(size)
    format = KvFormat(
        num_layers=num_layers,
        num_kv_heads=num_heads,
        head_bytes=4 * width * dtype.itemsize,
        block_size=4,
    )
    host_XC = rng.integers(0, 256, (num_slots, format.block_bytes), np.uint8)
    shards = [Shard(rank=rank, size=size) for rank in range(size)]
    ranks = [
        random_cache(rng, dtype, num_layers, (num_blocks, 4, heads, width))
        for heads in [max(1, num_heads // size)] * size
    ]
    # Ranks with the same head have the same KV.
    for kv, first in zip(ranks, [shard.kv_heads(num_heads)[0] for shard in shards], strict=True):
        if size > num_heads:
            twin = ranks[first * size // num_heads]
            for pair, other in zip(kv, twin, strict=True):
                for cache, same in zip(pair, other, strict=True):
                    cache.view(torch.uint8).copy_(same.view(torch.uint8))
    copies = [
        BlockCopies(
            kv,
            layout=CacheLayout(format=format, is_head_major=is_head_major),
            shard=shard,
            host_blocks_XC=host_XC,
        )
        for kv, shard in zip(ranks, shards, strict=True)
    ]
    expected_XC = host_XC.copy()
    for block, slot in ((6, 0), (0, 8), (3, 4)):
        expected_XC[slot] = plain_bytes(ranks, shards, block, num_heads, is_head_major)
    for each in copies:
        each.run(np.array([((0, 6), (1, 0)), ((0, 0), (1, 8)), ((0, 3), (1, 4))], np.int32))
    assert (host_XC == expected_XC).all()
    for each in copies:
        each.run(np.array([((1, 5), (0, 1)), ((1, 8), (0, 2)), ((0, 2), (0, 6))], np.int32))
    for block, slot in ((1, 5), (2, 8), (6, 8)):
        bytes_C = plain_bytes(ranks, shards, block, num_heads, is_head_major)
        assert bytes(host_XC[slot]) == bytes(bytes_C)
    assert (host_XC == expected_XC).all()


def random_cache(
    rng: np.random.Generator, dtype: torch.dtype, num_layers: int, shape: tuple[int, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    def cache() -> torch.Tensor:
        bytes_ = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
        return torch.from_numpy(bytes_).view(dtype)

    return [(cache(), cache()) for _ in range(num_layers)]


def plain_bytes(
    ranks: list[list[tuple[torch.Tensor, torch.Tensor]]],
    shards: list[Shard],
    block: int,
    num_heads: int,
    is_head_major: bool,
) -> bytearray:
    """A block's bytes in the order that `quire.worker.blocks.kv_format` defines."""
    whole = bytearray()
    for layer, which, head in itertools.product(range(len(ranks[0])), range(2), range(num_heads)):
        ranges = [shard.kv_heads(num_heads) for shard in shards]
        rank = next(rank for rank, (first, end) in enumerate(ranges) if first <= head < end)
        cache_NTKD = ranks[rank][layer][which]
        num_tokens, own_heads = cache_NTKD.shape[1:3]
        data, own = bytes(cache_NTKD[block].view(torch.uint8).numpy()), head - ranges[rank][0]
        size = len(data) // own_heads
        if is_head_major:
            whole += data[own * size : (own + 1) * size]
            continue
        of_token = size // num_tokens
        for token in range(num_tokens):
            at = (token * own_heads + own) * of_token
            whole += data[at : at + of_token]
    return whole


@pytest.mark.parametrize("is_head_major", [True, False])
def test_of_copies_to_one_place_the_last_counts(is_head_major: bool) -> None:
    rng = np.random.default_rng(0)
    format = KvFormat(num_layers=1, num_kv_heads=2, head_bytes=64, block_size=4)
    kv = random_cache(rng, torch.int8, 1, (6, 4, 2, 16))
    host_XC = np.zeros((3, format.block_bytes), np.uint8)
    layout = CacheLayout(format=format, is_head_major=is_head_major)
    copies = BlockCopies(kv, layout=layout, shard=Shard(), host_blocks_XC=host_XC)
    out = [((0, block), (1, 2)) for block in (3, 5, 1)]
    copies.run(np.array([*out, ((1, 2), (0, 0)), ((0, 4), (1, 2))], np.int32))
    for cache in kv[0]:
        assert (cache[0] == cache[1]).all()
    expected = plain_bytes([kv], [Shard()], 4, 2, is_head_major)
    assert bytes(host_XC[2]) == bytes(expected)


def test_ranks_that_have_one_head_read_what_the_first_of_them_writes_in_the_same_step() -> None:
    rng = np.random.default_rng(0)
    format = KvFormat(num_layers=1, num_kv_heads=1, head_bytes=64, block_size=4)
    host_XC = np.zeros((3, format.block_bytes), np.uint8)
    first = random_cache(rng, torch.int8, 1, (6, 4, 1, 16))
    second = [(k.clone(), v.clone()) for k, v in first]
    barrier = threading.Barrier(2)
    there_and_back = np.array([((0, 3), (1, 2)), ((1, 2), (0, 0)), ((0, 5), (1, 2))], np.int32)

    def run(rank: int, kv: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        copies = BlockCopies(
            kv,
            layout=CacheLayout(format=format, is_head_major=True),
            shard=Shard(rank=rank, size=2),
            host_blocks_XC=host_XC,
            meet=lambda: barrier.wait(30),
        )
        if not rank:
            time.sleep(0.05)  # Time in which the other rank could read.
        copies.run(there_and_back)

    threads = [threading.Thread(target=run, args=each) for each in ((0, first), (1, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kv in (first, second):
        for cache in kv[0]:
            assert (cache[0] == cache[3]).all()


def test_copies_of_blocks_that_are_not_there_are_refused(tiny_llama: Path, runner_of: Any) -> None:
    runner = runner_of(tiny_llama, kv_transfer=True)
    num_slots = runner.num_host_blocks
    for copy, message in (
        (((0, 128), (1, 0)), "block 128 of tier 0: must be below 128"),
        (((0, -1), (1, 0)), "block -1 of tier 0"),
        (((0, 1), (1, num_slots)), f"block {num_slots} of tier 1: must be below {num_slots}"),
        (((2, 0), (0, 0)), "tier 2: must be below 2"),
    ):
        with pytest.raises(IndexError, match=message):
            runner.execute(only_copies(copy))
    with pytest.raises(ValueError, match="copies within host memory"):
        runner.execute(only_copies(((1, 0), (1, 1))))
    with pytest.raises(IndexError, match="tier 1: must be below 1"):
        runner_of(tiny_llama).execute(only_copies(((0, 0), (1, 0))))


def test_host_memory_is_as_large_as_asked_for_and_has_room_for_some_blocks(
    tiny_llama: Path, config_of: Callable[..., Any]
) -> None:
    def executor(**options: Any) -> Executor:
        return make_executor(config_of(tiny_llama, **options))[0]

    # 2 layers of 2 KV heads of 16 tokens of 16 channels, float32
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    found = executor(kv_offloading_size=0.25)
    assert found.kv_format.block_bytes == block_bytes
    assert found.host_blocks_XC is not None
    num_bytes = (256 << 20) + (64 << 20)
    assert found.host_blocks_XC.shape == (num_bytes // block_bytes, block_bytes)
    assert executor().host_blocks_XC is None
    large = KvFormat(num_layers=80, num_kv_heads=64, head_bytes=32768, block_size=128)
    config = config_of(tiny_llama, kv_transfer=True)
    assert num_host_blocks(config, large) == MIN_SLOTS


def test_ranks_on_several_nodes_keep_no_blocks_outside(
    tiny_llama: Path, config_of: Callable[..., Any]
) -> None:
    config = config_of(tiny_llama, kv_transfer=True, tensor_parallel_size=2)
    launcher: Any = SimpleNamespace(num_nodes=2, stop=lambda: None)
    with pytest.raises(ConfigError, match="kv_transfer=True: the ranks of a group are on 2 nodes"):
        LockstepExecutor(config, launcher)
