"""Converts a log of requests with prompts to a trace that `quire simulate` replays.

The simulator identifies prompts by block hashes. Here they are computed with a model's tokenizer,
as a gateway does.
"""

from pathlib import Path

from quire.simulate.trace import Row, Trace
from quire.worker.bench.workload import WorkItem, read_workload
from quire.worker.blocks.hashing import BlockHash, hash_blocks
from quire.worker.request.errors import ConfigError
from quire.worker.text.tokenizer import Tokenizer

_ROOT = BlockHash(bytes(32))
"""Root of every hash chain, so that requests of one file share prefixes."""


def trace_of_requests(file: Path, *, model: Path, block_size: int, output_len: int) -> Trace:
    """Reads a workload of `quire bench` in which each line also has ``arrival_s``. ``max_tokens``
    is the number of generated tokens; ``output_len`` is used without it.

    Raises:
        InvalidRequest: The file cannot be read, or a line is not a request; names the line.
        ConfigError: A request has no arrival time, or a setting cannot work.
    """
    for name, value in (("block_size", block_size), ("output_len", output_len)):
        if value < 1:
            raise ConfigError(f"{name}={value}: must be 1 or more")
    workload = read_workload(file, tokenizer=lambda: Tokenizer.load(model), output_len=output_len)
    known: dict[BlockHash, BlockHash] = {}
    rows = [
        _row(file, number, item, block_size=block_size, known=known)
        for number, item in enumerate(workload.items, 1)
    ]
    return Trace.of(rows, name=file.stem, block_size=block_size)


def _row(
    file: Path, number: int, item: WorkItem, *, block_size: int, known: dict[BlockHash, BlockHash]
) -> Row:
    if item.arrival_s is None:
        raise ConfigError(
            f"{file}, request {number}: has no arrival_s, by some clock the seconds when it came"
        )
    names = hash_blocks(item.token_ids, block_size=block_size, root=_ROOT)
    # One object per block: comparing blocks is comparing pointers.
    chain = tuple(known.setdefault(name, name) for name in names)
    return Row(1000 * item.arrival_s, len(item.token_ids), item.max_tokens, chain)
