"""Reads traces: Mooncake's JSON lines, Azure's CSV, logs of one's own."""

import csv
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.simulate.trace import Row, Trace
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError

MOONCAKE_BLOCK_SIZE = 512


def load_trace(path: Path, *, format: str | None = None, block_size: int | None = None) -> Trace:
    """Reads a file of the format that its name ends in, or of ``format``.

    Raises:
        ConfigError: There is no such file or format, a line is not of it, or the size is not one.
    """
    if not path.exists():  # Before it is asked for the format of what is not there.
        raise ConfigError(f"{path}: No such file or directory; give the path of a trace")
    name = format or {".csv": "azure", ".jsonl": "mooncake"}.get(path.suffix, "")
    if name not in FORMATS:
        raise ConfigError(f"{path}: say its format, which is one of {', '.join(FORMATS)}")
    read, usual_block_size = FORMATS[name]
    if block_size is not None and block_size < 1:
        raise ConfigError(f"block_size={block_size}: must be 1 or more")
    size = block_size or usual_block_size
    try:
        with path.open(newline="") as lines:
            rows = list(_numbered(path, read(lines, size), format=name))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a trace") from None
    if not rows:
        raise ConfigError(f"{path}, read as {name}: no requests; one per line is needed")
    return Trace.of(rows, name=path.stem, block_size=size)


def block_name(name: object) -> BlockHash:
    """Any name as a block's hash; the same name gives the same hash."""
    return BlockHash(hashlib.sha256(repr(name).encode()).digest())


def _mooncake(lines: Iterator[str], block_size: int) -> Iterator[Row]:
    """``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens each."""
    names = _Names()
    for line in lines:
        request = json.loads(line)
        yield Row(
            float(request["timestamp"]),
            int(request["input_length"]),
            max(int(request["output_length"]), 1),
            tuple(names[name] for name in request["hash_ids"]),
        )


def _log(lines: Iterator[str], block_size: int) -> Iterator[Row]:
    """A log of one's own: ``arrival_s``, ``num_prompt_tokens``, ``num_output_tokens``, ``blocks``.

    ``blocks`` names the full blocks of the prompt, by any JSON value that two prompts share
    exactly where they are equal up to there. Without it nothing is reused.
    """
    names = _Names()
    for line in lines:
        request = json.loads(line)
        yield Row(
            1000 * float(request["arrival_s"]),
            int(request["num_prompt_tokens"]),
            max(int(request["num_output_tokens"]), 1),
            tuple(names[json.dumps(name)] for name in request.get("blocks", ())),
        )


def _azure(lines: Iterator[str], block_size: int) -> Iterator[Row]:
    """Azure's traces of 2023 and 2024: when and how many tokens, but not which.

    Prefixes are made up, from a seed: 100 system prompts of 256 to 2,048 tokens, the i-th chosen
    with a probability that falls as 1/i; half of the prompts then go on one of the last thousand
    conversations that began so.
    """
    rng, names = random.Random(0), _Names()
    systems = [rng.randint(256, 2048) for _ in range(100)]
    open_chats: list[list[tuple[BlockHash, ...]]] = [[] for _ in systems]
    for number, request in enumerate(csv.DictReader(lines)):
        system = int(len(systems) ** rng.random()) - 1
        chats = open_chats[system]
        chain = tuple(names["s", system, i] for i in range(systems[system] // block_size))
        num_tokens = systems[system] + int(request["ContextTokens"])
        if chats and rng.random() < 0.5:
            chain = chats[rng.randrange(len(chats))]
            num_tokens = len(chain) * block_size + int(request["ContextTokens"])
        own = range(max(num_tokens // block_size - len(chain), 0))
        chain += tuple(names["r", number, i] for i in own)
        if len(chain) * block_size <= 16_384:
            chats.append(chain)
            del chats[:-1000]
        yield Row(
            1000 * datetime.fromisoformat(request["TIMESTAMP"][:26]).timestamp(),
            num_tokens,
            max(int(request["GeneratedTokens"]), 1),
            chain,
        )


FORMATS: Mapping[str, tuple[Callable[[Iterator[str], int], Iterator[Row]], int]] = {
    "mooncake": (_mooncake, MOONCAKE_BLOCK_SIZE),
    "azure": (_azure, 64),
    "log": (_log, 16),
}


class _Names(dict[Any, BlockHash]):
    """Hashes by name: one object per block, so that comparing them is comparing pointers."""

    def __missing__(self, name: Any) -> BlockHash:
        self[name] = block_hash = block_name(name)
        return block_hash


def _numbered(path: Path, rows: Iterator[Row], *, format: str) -> Iterator[Row]:
    number = 1
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{path}, request {number}, read as {format}: {reason}; formats are "
                f"{', '.join(FORMATS)}, and docs/simulator.md says what each holds"
            ) from None
        yield row
        number += 1
