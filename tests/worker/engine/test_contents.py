"""An engine remembers the tokens of its blocks in every tier."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.engine_requests import MakeEngine, range_prompt, request, run

from quire.worker.blocks.events import BlockContent, EventLog
from quire.worker.blocks.hashing import BlockHash, hash_blocks, root_hash
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

Contents = dict[BlockHash, BlockContent]
BLOCK_BYTES = 24 * 4


def chain(tokens: list[int], *, salt: str = "") -> Contents:
    """The blocks of a sequence, hashed from its tokens alone."""
    root = root_hash(model_fingerprint="hash-1", kv_dtype="float32", block_size=4, cache_salt=salt)
    array = np.array(tokens, dtype=np.uint32)
    names = list(hash_blocks(array, block_size=4, root=root))
    return {
        name: BlockContent(parent, array[4 * index : 4 * index + 4].tobytes(), "", salt)
        for index, (name, parent) in enumerate(zip(names, [None, *names[:-1]], strict=True))
    }


def stored(log: EventLog) -> set[BlockHash]:
    snapshot = log.snapshot()
    return {name for names in (snapshot.snapshot or (), *snapshot.slower) for name in names}


def serve(engine: Any, requests: int, *, begin: int = 0) -> Contents:
    """Runs requests that together exceed the cache; returns all of their blocks."""
    blocks: Contents = {}
    for number in range(requests):
        prompt, salt = range_prompt(48, first=2 + 5 * (begin + number)), "s" * (number % 2)
        ended = run(engine, request(f"r{begin}-{number}", prompt, salt=salt))
        (output,) = (delta.token_ids for delta in ended.values())
        blocks |= chain([*prompt, *output][:-1], salt=salt)
    return blocks


@pytest.mark.slow
def test_contents_follow_blocks_through_host_memory_and_disk(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "num_blocks": 16,
        "host_kv_bytes": 64 * BLOCK_BYTES,
        "kv_offloading_size": 30 * BLOCK_BYTES / 2**30,
        "kv_disk_dir": tmp_path,
        "kv_events": True,
    }
    engine, _ = make_engine(**options)
    blocks = serve(engine, 8)
    log = engine.events
    assert log.contents == {name: blocks[name] for name in stored(log)}
    assert len(stored(log)) > 16 + 30, "the disk has some"
    engine.close()

    again, _ = make_engine(**options)
    log = again.events
    assert stored(log)
    assert log.contents == {}, "a disk does not say which tokens its blocks are of"
    blocks |= serve(again, 2)
    assert log.contents is not None
    assert log.contents.keys() <= stored(log)
    assert log.contents.items() <= blocks.items()
    assert set(chain(range_prompt(48))) <= log.contents.keys(), "it was used, from disk"
    again.close()


def test_nothing_is_remembered_where_nobody_asked(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    serve(engine, 2)
    assert engine.events.contents is None


def test_blocks_that_are_not_cached_cannot_be_told_of() -> None:
    with pytest.raises(ConfigError, match="kv_events=True: needs enable_prefix_caching"):
        EngineConfig(model=Path("none"), kv_events=True, enable_prefix_caching=False)
