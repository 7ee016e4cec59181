"""``quire bench reuse``: the time to the first token, by the place that holds the prompt's prefix.

    computed   nowhere: all of the prompt is computed
    cache      the group's KV cache
    host       its host memory (``--kv-offloading-size``)
    disk       its disk (``--kv-disk-dir``)
    peer       another group's KV cache, in a process of its own

Each prompt is new, and is first computed once where it is then to be found. Every answer must
equal, log-probabilities included, the one that computing the prompt gave.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.cluster.cli.engine import engine_config
from quire.cluster.config import ClusterConfig
from quire.cluster.links.group_link import GroupContact
from quire.cluster.tools.bench.command import LENGTHS
from quire.worker.bench import plot, report
from quire.worker.bench.reuse import PLACES, ReuseRow, reuse_table
from quire.worker.blocks.hashing import TokenIds
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.cluster.group.server import GroupServer

_ASKED = SamplingParams(temperature=0, max_tokens=4, logprobs=1, seed=1)
_TAIL_TOKENS = 8
"""Tokens of each prompt after the prefix; they are always computed."""
_MORE_TOKENS = _TAIL_TOKENS + (_ASKED.max_tokens or 0)
"""Tokens of each request after the prefix, output included."""
_SETTLE_S = 0.3
_NUM_OTHERS = 4
"""Prompts that evict all of one. The cache holds two, and evicts each from its end on: the first
blocks are often there until the fourth comes."""

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""An answer's token ids and their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class ReuseConfig:
    engine: EngineConfig
    lengths: tuple[int, ...]
    repeats: int
    seed: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < self.engine.block_size:
            raise ConfigError(
                f"lengths={self.lengths}: at least one, of a block ({self.engine.block_size}) up"
            )
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats}: must be 1 or more")

    def cluster(self, **changes: Any) -> ClusterConfig:
        """Settings of one group whose cache holds two of the longest prompts."""
        longest = max(self.lengths) + _MORE_TOKENS
        num_blocks = 2 * (-(-longest // self.engine.block_size) + 1)
        engine = replace(
            self.engine,
            num_blocks=num_blocks,
            max_model_len=longest,
            gpu_memory_utilization=None,
            **changes,
        )
        return ClusterConfig(engine=engine)


def run_reuse(config: ReuseConfig, *, output: Path, title: str) -> int:
    """Measures, prints a table, and writes JSON and a plot to ``output``."""
    report.check_writable(output)
    rows = asyncio.run(_measure(config))
    print(f"{title}: time to the first token, and as a share of computing the prompt\n")
    print(reuse_table(rows))
    print("\nevery answer and log-probability equals the computed one")
    file = output.with_name(f"{output.name}.json")
    settings = {**asdict(config.engine), "model": str(config.engine.model)}
    settings["kv_disk_dir"] = str(config.engine.kv_disk_dir)
    told = {"benchmark": "reuse", "engine": settings, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")
    if plot.has_matplotlib():
        picture = output.with_name(f"{output.name}.png")
        plot.plot_reuse(rows, picture, title=title)
        print(f"wrote {picture}")
    else:
        print(f"no plot: that needs matplotlib ({plot.INSTALL})")
    return 0


async def _measure(config: ReuseConfig) -> list[ReuseRow]:
    prompts = _prompts(config)
    times: dict[tuple[int, str], list[float]] = {}

    def note(length: int, place: str, seconds: float) -> None:
        times.setdefault((length, place), []).append(seconds)

    with _lender(config) as lender, tempfile.TemporaryDirectory() as folder:
        offloading = config.cluster(kv_offloading_size=_host_gib(config), kv_transfer=True)
        async with _group(offloading) as group:
            for length in config.lengths:
                _say(f"{length} tokens: computed, cache, host, peer")
                for _ in range(config.repeats):
                    prompt = next(prompts[length])
                    computed_s, expected, _ = await _ask(group, prompt)
                    note(length, "computed", computed_s)
                    cached_s, answer, _ = await _ask(group, prompt)
                    _check(answer, expected, "cache")
                    note(length, "cache", cached_s)
                    await _evict(group, prompts[max(config.lengths)])
                    host_s, answer, delta = await _ask(group, prompt)
                    _check(answer, expected, "host")
                    _found(delta, "num_host_tokens", length, config)
                    note(length, "host", host_s)

                    prompt = next(prompts[length])
                    expected = lender.compute(prompt)
                    peer_s, answer, delta = await _ask(group, prompt, lender.source(length))
                    _check(answer, expected, "peer")
                    _found(delta, "num_peer_tokens", length, config)
                    note(length, "peer", peer_s)
        disk = config.engine.kv_disk_dir or Path(folder)
        async with _group(config.cluster(kv_disk_dir=disk)) as group:
            for length in config.lengths:
                _say(f"{length} tokens: disk")
                for _ in range(config.repeats):
                    prompt = next(prompts[length])
                    _, expected, _ = await _ask(group, prompt)
                    await _evict(group, prompts[max(config.lengths)])
                    await asyncio.sleep(_SETTLE_S)  # Until it is written to disk.
                    disk_s, answer, delta = await _ask(group, prompt)
                    _check(answer, expected, "disk")
                    _found(delta, "num_disk_tokens", length, config)
                    note(length, "disk", disk_s)
    return [
        ReuseRow(
            num_tokens=length,
            seconds={place: median(times[length, place]) for place in PLACES},
        )
        for length in config.lengths
    ]


def _prompts(config: ReuseConfig) -> dict[int, Iterator[TokenIds]]:
    """For each prefix length, an endless supply of new prompts."""
    random = np.random.default_rng(config.seed)

    def new(length: int) -> Iterator[TokenIds]:
        while True:
            ids = random.integers(0, config.vocab_size, length + _TAIL_TOKENS)
            yield ids.astype(np.uint32)

    return {length: new(length) for length in config.lengths}


async def _ask(
    group: "GroupServer", prompt: TokenIds, source: PeerSource | None = None
) -> tuple[float, Answer, Any]:
    """Seconds to the first token, the answer, and the first output."""
    loop = asyncio.get_running_loop()
    request = Prepared(
        request_id=str(loop.time()), prompt_token_ids=prompt, sampling=_ASKED, source=source
    )
    begin_s, first_s, first = loop.time(), 0.0, None
    tokens, logprobs = list[int](), list[float]()
    async for delta in group.generate(request):
        if first is None:
            first, first_s = delta, loop.time() - begin_s
        tokens += delta.token_ids
        logprobs += [each.logprob for each in delta.logprobs]
    return first_s, (tuple(tokens), tuple(logprobs)), first


async def _evict(group: "GroupServer", others: Iterator[TokenIds]) -> None:
    for _ in range(_NUM_OTHERS):
        await _ask(group, next(others))


def _check(answer: Answer, expected: Answer, place: str) -> None:
    if answer != expected:
        raise AssertionError(f"{place}: {answer} is not what was computed: {expected}")


def _found(first: Any, field: str, length: int, config: ReuseConfig) -> None:
    size = config.engine.block_size
    num_tokens = 0 if first.fetched is None else getattr(first.fetched, field)
    if num_tokens < length // size * size - size:
        elsewhere = 0 if first.fetched is None else first.fetched.num_tokens
        _say(
            f"only {num_tokens} of {length} tokens came from there; "
            f"{first.num_cached_tokens - elsewhere} were still in the KV cache: {first.fetched}"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _host_gib(config: ReuseConfig) -> float:
    """Host memory for several caches, in GiB, so that evicted blocks are found again."""
    from quire.worker.bench.sweep import token_bytes

    return 16 * max(config.lengths) * token_bytes(config.engine) / 2**30


@asynccontextmanager
async def _group(config: ClusterConfig) -> AsyncIterator["GroupServer"]:
    from quire.cluster.group.server import GroupServer

    group = await GroupServer.start(config, group_id="bench")
    try:
        for token in range(2):  # The first runs allocate memory.
            await _ask(group, np.full(2 * config.engine.block_size, token, np.uint32))
        yield group
    finally:
        await group.stop(drain_timeout_s=0)


class _Lender:
    """Another group, in its own process."""

    def __init__(self, pipe: "Connection[Any, Any]", block_size: int) -> None:
        self._pipe = pipe
        self._block_size = block_size
        contact = pipe.recv()
        if not isinstance(contact, GroupContact):
            raise ConfigError(f"the other group did not start: {contact}")
        self._contact = contact

    def compute(self, prompt: TokenIds) -> Answer:
        self._pipe.send(prompt)
        answer: Answer = self._pipe.recv()
        return answer

    def source(self, length: int) -> PeerSource:
        contact = self._contact
        return PeerSource(
            group_id="lender",
            address=contact.address,
            token=contact.token,
            certificate=contact.certificate,
            num_blocks=length // self._block_size,
        )


@contextmanager
def _lender(config: ReuseConfig) -> Iterator[_Lender]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_lend, args=(config.cluster(kv_transfer=True), theirs))
    process.start()
    theirs.close()
    try:
        yield _Lender(ours, config.engine.block_size)
    finally:
        ours.close()
        process.join(30)
        process.kill()


def _lend(config: ClusterConfig, pipe: "Connection[Any, Any]") -> None:
    """The other process: computes each prompt that it receives, until the pipe is closed."""

    async def serve() -> None:
        try:
            async with _group(config) as group:
                pipe.send(group.contact)
                while True:
                    prompt = await asyncio.to_thread(pipe.recv)
                    _, answer, _ = await _ask(group, prompt)
                    pipe.send(answer)
        except EOFError:
            return
        except Exception as error:
            pipe.send(repr(error))

    asyncio.run(serve())


def reuse(arguments: argparse.Namespace) -> int:
    """Runs the command ``quire bench reuse``."""
    from quire.worker.model.config import read_model_spec
    from quire.worker.model.hub import fetch_checkpoint, model_name

    engine = engine_config(arguments, arguments.model)
    engine = replace(engine, model=fetch_checkpoint(engine.model))
    spec = read_model_spec(engine.model, model_impl=engine.model_impl)
    longest = spec.max_positions - _MORE_TOKENS
    given: Sequence[int] | None = arguments.lengths
    if given is not None and max(given) > longest:
        raise ConfigError(
            f"lengths={max(given)}: the model was trained for {spec.max_positions} positions, and "
            f"{_MORE_TOKENS} come behind the prefix: {longest} at most"
        )
    lengths = given or [length for length in LENGTHS if length <= longest]
    config = ReuseConfig(
        engine=engine,
        lengths=tuple(dict.fromkeys(lengths)),
        repeats=arguments.repeats,
        seed=arguments.seed,
        vocab_size=spec.vocab_size,
    )
    return run_reuse(config, output=arguments.output, title=model_name(engine.model))
