"""What `bench/directory_costs.py` measures: Quire's directory and its peers, in one form.

Each imports what it needs when it is made, so that this runs in the peers' environment too.
"""

import asyncio
import importlib
import importlib.util
import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

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
        from quire.router import directory, native_holders, python_holders
        from quire.v1 import group_pb2
        from quire.worker import events, hashing

        self._np, self._wire, self._pb = np, wire, group_pb2
        self._events, self._hashing = events, hashing
        max_blocks = 2 * num_blocks
        library = native_holders.library()
        assert library is not None
        self._directory = directory.BlockDirectory(
            max_blocks=max_blocks,
            index=native_holders.NativeHolders(library, max_blocks=max_blocks)
            if self.index_class == "native"
            else python_holders.PythonHolders(max_blocks=max_blocks),
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


class Selection:
    """``SelectionService`` of ai-dynamo-runtime, which Ray's KVAwareRouter wraps, in this process.

    It subscribes to each group's events as vLLM publishes them: msgpack over ZeroMQ. Those name a
    block and tell its tokens, which here are the name's 16-bit words. A look-up is its
    ``overlap_scores`` of block hashes, a decision its ``select`` by tokens, which books nothing;
    both are awaited on an event loop, as the router does.
    """

    names: ClassVar[dict[str, str]] = {"model_name": "m", "tenant_id": "t"}

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        core = importlib.import_module("dynamo._core")
        self._zmq = importlib.import_module("zmq")
        self._pack = importlib.import_module("msgpack").packb
        self._hash = core.compute_block_hash_for_seq
        self._loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        self._next_seq = [0] * num_groups
        self._touched: set[int] = set()
        self._marks = itertools.count()
        self._service = core.SelectionService()
        context = self._zmq.Context()
        self._sockets = []
        for group in range(num_groups):
            socket = context.socket(self._zmq.XPUB)
            socket.setsockopt(self._zmq.SNDHWM, 0)
            address = f"ipc://{self._folder.name}/{group}"
            socket.bind(address)
            self._sockets.append(socket)
            worker = {
                "worker_id": group,
                "endpoint": f"ray://{group}",
                "block_size": BLOCK_TOKENS,
                "max_num_batched_tokens": 8192,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "kv_events_endpoints": {0: address},
            }
            self._wait(self._service.upsert_worker, self.names | worker)
        for socket in self._sockets:
            assert socket.poll(30_000), "the service did not subscribe"
            socket.recv()

    def stored(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        parent = _numbers(chain[HASH * (start - 1) : HASH * start])[0] if start else None
        data = chain[HASH * start : HASH * stop]
        return self._message(["BlockStored", _numbers(data), parent, _words(data), 16, None])

    def removed(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        return self._message(["BlockRemoved", _numbers(chain[HASH * start : HASH * stop])])

    def apply(self, group: int, event: Any) -> None:
        seq = self._next_seq[group].to_bytes(8, "big")
        self._next_seq[group] += 1
        self._sockets[group].send_multipart([b"", seq, event])
        self._touched.add(group)

    def settle(self) -> None:
        """Until a last block of each group, stored behind its other events, is found."""
        for group in self._touched.copy():
            mark = random.Random(f"mark {next(self._marks)}").randbytes(HASH)
            self.apply(group, self.stored(group, mark, 0, 1))
            query = self.query(mark)
            while not self.look_up(query).get(group):
                pass
            self.apply(group, self.removed(group, mark, 0, 1))
        self._touched.clear()

    def query(self, chain: bytes) -> Any:
        hashes = self._hash(_words(chain), BLOCK_TOKENS)
        signed = [n - (n >> 63 << 64) for n in hashes]
        tokens = BLOCK_TOKENS * len(signed)
        hashes = {"block_hashes": signed, "sequence_hashes": signed, "isl_tokens": tokens}
        return self.names | hashes

    def look_up(self, query: Any) -> Held:
        found = self._wait(self._service.overlap_scores, query)["workers"]
        return {w["worker_id"]: w["device_blocks"] for w in found if w["device_blocks"]}

    def tokens(self, count: int) -> Any:
        return list(range(count))

    def decide(self, tokens: Any) -> None:
        self._wait(self._service.select, self.names | {"token_ids": tokens})

    def _message(self, event: list[Any]) -> Any:
        return self._pack([0.0, [event], 0])

    def _wait(self, ask: Callable[..., Any], request: Any) -> Any:
        async def wait() -> Any:
            return await ask(request)

        return self._loop.run_until_complete(wait())


class Ray:
    """``PrefixTree`` of Ray's LLM routers. It knows text, 4 characters a token here, and no
    events: what is stored is a whole prompt."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        name = "llm/_internal/serve/routing_policies/prefix_aware/prefix_tree.py"
        spec = importlib.util.find_spec("ray")
        assert spec is not None
        assert spec.submodule_search_locations
        path = Path(spec.submodule_search_locations[0]) / name
        module_spec = importlib.util.spec_from_file_location("prefix_tree", path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        self._tree = module.PrefixTree()
        self._tree.add_tenants([f"g{group}" for group in range(num_groups)], 0)

    def stored(self, group: int, chain: bytes, start: int, stop: int) -> Any:
        return chain[: HASH * stop].hex()

    def apply(self, group: int, event: Any) -> None:
        self._tree.insert(event, f"g{group}", 1.0)

    def query(self, chain: bytes) -> Any:
        return chain.hex()

    def look_up(self, query: Any) -> Held:
        text, tenants = self._tree.prefix_match(query)
        return dict.fromkeys(tenants or (), len(text) // (2 * HASH))


SUBJECTS: dict[str, Callable[[int, int], Any]] = {
    "quire": Quire,
    "quire-python": QuirePython,
    "dynamo": Dynamo,
    "selection": Selection,
    "ray": Ray,
}


def _numbers(data: bytes) -> list[int]:
    return list(memoryview(data).cast("Q")[::4]) if data else []


def _words(data: bytes) -> list[int]:
    return list(memoryview(data).cast("H"))


def _dynamo(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()
