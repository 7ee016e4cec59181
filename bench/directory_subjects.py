"""What `bench/directory_costs.py` measures: Quire's directory and Dynamo's, in one form.

Each imports what it needs when it is made, so that this runs in Dynamo's environment too.
"""

import importlib
import json
from collections.abc import Callable
from typing import Any, Protocol

BLOCK_TOKENS = 16
HASH = 32
"""Bytes of a block's name."""

Held = dict[Any, int]
"""Blocks by group."""


class Subject(Protocol):
    """``chain`` is the names of a chain's blocks, `HASH` bytes each."""

    def stored(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        """An event as it comes over the wire: not timed, as is `query`."""

    def removed(self, group: int, chain: bytes, start: int, stop: int) -> Any: ...
    def apply(self, group: int, event: Any) -> None: ...
    def query(self, chain: bytes) -> Any: ...
    def look_up(self, query: Any) -> Held: ...
    def decide(self, tokens: Any) -> None:
        """From the tokens of a prompt to the overlap with each group."""

    def tokens(self, count: int) -> Any: ...


class Quire:
    """The compiled index; events as protobuf."""

    index_class = "native"

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        import numpy as np

        from quire.cluster import wire
        from quire.router.prefix_index import directory
        from quire.router.prefix_index import native_index as native_holders
        from quire.router.prefix_index import python_index as python_holders
        from quire.v1 import group_pb2
        from quire.worker.api import events, hashing

        self._np, self._wire, self._pb = np, wire, group_pb2
        self._events, self._hashing = events, hashing
        max_blocks = 2 * num_blocks
        library = native_holders.library()
        assert library is not None
        self._directory = directory.BlockDirectory(
            max_blocks=max_blocks,
            index=native_holders.NativePrefixIndex(library, max_blocks=max_blocks)
            if self.index_class == "native"
            else python_holders.PythonPrefixIndex(max_blocks=max_blocks),
        )
        self._names = [directory.GroupId(f"g{group}") for group in range(num_groups)]
        self._next_seq = [0] * num_groups
        self._root = hashing.root_hash(model_fingerprint="m", kv_dtype="f", block_size=16)

    def stored(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        return self._message(group, stored=chain[HASH * start : HASH * stop])

    def removed(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        return self._message(group, removed=chain[HASH * start : HASH * stop])

    def apply(self, group: int, event: Any) -> None:
        batch = self._wire.events_from_proto(self._pb.EventBatch.FromString(event))
        self._directory.apply(self._names[group], batch, now_s=0)

    def query(self, chain: bytes) -> Any:
        return self._hashing.BlockHashes(chain)

    def look_up(self, query: Any) -> Held:
        found: Held = self._directory.longest_prefix(query)
        return found

    def lengths(self, query: Any) -> None:
        self._directory.prefix_lengths(query)

    def tokens(self, count: int) -> Any:
        return self._np.arange(count, dtype=self._np.uint32)

    def decide(self, tokens: Any) -> None:
        hashes = self._hashing.hash_blocks(tokens, block_size=BLOCK_TOKENS, root=self._root)
        self._directory.longest_prefix(hashes)

    def hash_only(self, tokens: Any) -> None:
        self._hashing.hash_blocks(tokens, block_size=BLOCK_TOKENS, root=self._root)

    def _message(self, group: int, **event: bytes) -> bytes:
        seq = self._next_seq[group]
        self._next_seq[group] += 1
        message = self._pb.EventBatch(epoch=1, first_seq=seq, events=[event])
        data: bytes = message.SerializeToString()
        return data


class QuirePython(Quire):
    """The fallback index."""

    index_class = "python"


class Dynamo:
    """``RadixTree`` of ai-dynamo-runtime; events as JSON."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        core = importlib.import_module("dynamo._core")
        self._tree = core.RadixTree()
        self._hash = core.compute_block_hash_for_seq

    def stored(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        numbers = _numbers(chain[HASH * start : HASH * stop])
        parent = _numbers(chain[HASH * (start - 1) : HASH * start])[0] if start else None
        blocks = [{"block_hash": n, "tokens_hash": n, "mm_extra_info": None} for n in numbers]
        return _dynamo({"stored": {"parent_hash": parent, "blocks": blocks}})

    def removed(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        hashes = _numbers(chain[HASH * start : HASH * stop])
        return _dynamo({"removed": {"block_hashes": hashes}})

    def apply(self, group: int, event: Any) -> None:
        self._tree.apply_event(group, event)

    def query(self, chain: bytes) -> Any:
        return _numbers(chain)

    def look_up(self, query: Any) -> Held:
        found: Held = self._tree.find_matches(query).scores
        return found

    def tokens(self, count: int) -> Any:
        return list(range(count))

    def decide(self, tokens: Any) -> None:
        self._tree.find_matches(self._hash(tokens, BLOCK_TOKENS))


SUBJECTS: dict[str, Callable[[int, int], Any]] = {
    "quire": Quire,
    "quire-python": QuirePython,
    "dynamo": Dynamo,
}


def _numbers(data: bytes) -> list[int]:
    return list(memoryview(data).cast("Q")[::4]) if data else []


def _dynamo(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()
