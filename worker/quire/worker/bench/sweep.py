"""Runs a workload over block sizes, cache sizes, and prefix caching off and on.

Each repeat runs every combination, with caching off and on consecutively, so that warm-up or other
load on the machine affects all alike. The model is loaded once per repeat and block size, so memory
for one model and one KV cache is enough.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from quire.worker.bench.cache_size import CacheSize
from quire.worker.bench.measure import Run, run_workload
from quire.worker.bench.workload import WorkItem, Workload
from quire.worker.model.config import read_model_spec, resolve_dtype, resolve_max_model_len
from quire.worker.model.spec import ModelSpec
from quire.worker.rank.executor import make_executor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

_WARM_UP_REQUESTS = 8
_PROBE_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The combinations to run. ``engine``'s block size, cache size and prefix caching are ignored.

    Raises:
        ConfigError: There is nothing to run.
    """

    engine: EngineConfig
    block_sizes: tuple[int, ...]
    cache_sizes: tuple[CacheSize, ...]
    skips_small: bool = False
    """Whether to skip cache sizes that cannot hold the longest request, rather than refuse them."""
    caching: tuple[bool, ...] = (False, True)
    repeats: int = 3
    concurrency: int | None = None
    """Requests in the engine at a time; ``None`` submits all at once."""

    def __post_init__(self) -> None:
        for name in ("block_sizes", "cache_sizes", "caching"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: at least one")
        for name in ("repeats", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of block size and cache size, with the cache's blocks and bytes."""

    block_size: int
    cache_size: str
    num_blocks: int
    cache_bytes: int


Runs = dict[Cell, dict[bool, list[Run]]]
"""The runs of all repeats, by cell and by whether prefix caching was on."""


def run_sweep(config: SweepConfig, workload: Workload, *, progress: Callable[[str], None]) -> Runs:
    """Runs all combinations; calls ``progress`` before each repeat of a block size.

    Raises:
        ConfigError: The workload does not fit the model or a cache size. Nothing was run.
    """
    check_workload(
        workload, read_model_spec(config.engine.model, model_impl=config.engine.model_impl)
    )
    bytes_of_token = token_bytes(config.engine)
    if config.skips_small:
        config = _without_small(config, workload, token_bytes=bytes_of_token, progress=progress)
    cells = plan_cells(config, workload, token_bytes=bytes_of_token)
    runs: Runs = {cell: {caching: [] for caching in config.caching} for cell in cells}
    for repeat in range(config.repeats):
        for block_size in config.block_sizes:
            progress(f"repeat {repeat + 1} of {config.repeats}, block size {block_size}")
            mine = [cell for cell in cells if cell.block_size == block_size]
            for cell, caching, run in _run_block_size(config, workload, mine):
                runs[cell][caching].append(run)
    return runs


def check_workload(workload: Workload, spec: ModelSpec) -> None:
    """Checks every request before the model is loaded.

    Raises:
        ConfigError: A request does not fit the model.
    """
    for number, item in enumerate(workload.items, 1):
        if item.num_tokens > spec.max_positions:
            raise ConfigError(
                f"request {number} has {len(item.token_ids)} tokens and {item.max_tokens} of "
                f"output, the model was trained for {spec.max_positions}: shorten "
                "one of the two"
            )
        if item.token_ids.max() >= spec.vocab_size:
            raise ConfigError(
                f"request {number} has token id {item.token_ids.max()}, the model's are 0 to "
                f"{spec.vocab_size - 1}: is it tokenized for another model?"
            )


def plan_cells(config: SweepConfig, workload: Workload, *, token_bytes: int) -> list[Cell]:
    """The combinations of block size and cache size, each checked to hold the longest request.

    Raises:
        ConfigError: One cannot; the message says which size can.
    """
    cells = []
    for block_size in config.block_sizes:
        needed = -(-workload.longest // block_size)
        for size in config.cache_sizes:
            num_blocks = size.num_blocks(
                block_size=block_size,
                token_bytes=token_bytes,
                workload_tokens=workload.num_tokens,
            )
            if num_blocks < needed:
                share = 100 * needed * block_size / workload.num_tokens
                raise ConfigError(
                    f"cache size {size.text} is {num_blocks} blocks of {block_size} tokens, the "
                    f"longest request needs {needed}: at least {share:.1f}% or "
                    f"{needed * block_size}tokens"
                )
            cells.append(
                Cell(
                    block_size=block_size,
                    cache_size=size.text,
                    num_blocks=num_blocks,
                    cache_bytes=num_blocks * block_size * token_bytes,
                )
            )
    return cells


def _without_small(
    config: SweepConfig, workload: Workload, *, token_bytes: int, progress: Callable[[str], None]
) -> SweepConfig:
    """Drops the cache sizes that `plan_cells` refuses, and reports each to ``progress``."""
    fitting, refusal = [], None
    for size in config.cache_sizes:
        try:
            plan_cells(replace(config, cache_sizes=(size,)), workload, token_bytes=token_bytes)
        except ConfigError as error:
            refusal = error
            progress(f"left out: {error}")
        else:
            fitting.append(size)
    if refusal is not None and not fitting:
        raise refusal
    return replace(config, cache_sizes=tuple(fitting))


def token_bytes(engine: EngineConfig) -> int:
    """KV bytes of one token over all ranks of a group."""
    import torch

    from quire.worker.model.load import find_attentions
    from quire.worker.rank.kv import kv_layout

    model = read_model_spec(engine.model, model_impl=engine.model_impl)
    dtype = resolve_dtype(engine, model)
    max_model_len = resolve_max_model_len(engine, model)
    attentions = find_attentions(
        engine, model, dtype=getattr(torch, dtype), max_model_len=max_model_len
    )
    layout = kv_layout(engine, attentions, dtype=dtype)
    return layout.block_bytes // layout.block_size * engine.tensor_parallel_size


def _run_block_size(
    config: SweepConfig, workload: Workload, cells: list[Cell]
) -> Iterator[tuple[Cell, bool, Run]]:
    """One repeat of one block size: all cache sizes, with one model and the largest cache."""
    largest = max(cell.num_blocks for cell in cells)
    engine = replace(
        config.engine,
        block_size=cells[0].block_size,
        num_blocks=largest,
        gpu_memory_utilization=None,
        kv_cache_memory_bytes=None,
        max_model_len=workload.longest,
        max_num_waiting=len(workload.items),
    )
    probing = replace(
        engine,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_num_batched_tokens=-(-workload.longest // _PROBE_CHUNKS),
    )
    executor, facts = make_executor(engine)

    def run(what: Workload, settings: EngineConfig, *, num_blocks: int) -> Run:
        return run_workload(
            what, executor, facts, settings, num_blocks=num_blocks, concurrency=config.concurrency
        )

    try:
        run(_warm_up(workload), engine, num_blocks=largest)
        for cell in cells:
            for caching in config.caching:
                settings = replace(engine, enable_prefix_caching=caching)
                measured = run(workload, settings, num_blocks=cell.num_blocks)
                if not caching:
                    probe = run(_longest(workload), probing, num_blocks=largest)
                    measured = replace(measured, probe=probe.steps)
                yield cell, caching, measured
    finally:
        executor.close()


def _longest(workload: Workload) -> Workload:
    """The longest prompt alone; its steps show a chunk's cost by the length before it."""
    prompt = max((item.token_ids for item in workload.items), key=len)
    return Workload(title="probe", items=(WorkItem(token_ids=prompt, max_tokens=1),))


def _warm_up(workload: Workload) -> Workload:
    """The first few requests, two tokens each: first calls allocate and compile."""
    items = tuple(
        WorkItem(token_ids=item.token_ids, max_tokens=min(2, item.max_tokens))
        for item in workload.items[:_WARM_UP_REQUESTS]
    )
    return Workload(title="warm-up", items=items)
