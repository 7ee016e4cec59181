"""What `bench/directory.py` measures, one process each: Quire's directory and its peers.

    python bench/directory_subjects.py NAME NUM_BLOCKS NUM_GROUPS

Prints one JSON object. Imports what the subject needs and nothing else, so that it runs in the
peers' environment too.
"""

import asyncio
import gc
import importlib
import importlib.util
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

CHAIN_BLOCKS = 8_000
EVENT_BLOCKS = 512
"""A prefill chunk of 8,192 tokens."""
PROMPT_BLOCKS = (100, 1_000, 8_000)
BLOCK_TOKENS = 16
PROMPT_TOKENS = (16_384, 131_072)
NUM_LOOKUPS = 400
NUM_SLOW_LOOKUPS = 60
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


def measure(name: str, num_blocks: int, num_groups: int) -> dict[str, float]:
    """Chain 0 is held by all groups; each other one by 1 to 4, of which the first holds all."""
    subject = SUBJECTS[name](num_blocks, num_groups)
    whole_prompts = name == "ray"
    num_chains = max(num_blocks // CHAIN_BLOCKS, 2)
    gc.collect()
    before = _rss_bytes()
    seconds, num_stored = 0.0, 0
    for number in range(num_chains):
        chain = _chain(number)
        for group, length in _holders(number, num_chains, num_groups):
            step = length if whole_prompts else EVENT_BLOCKS
            events = [
                subject.stored(group, chain, start, min(start + step, length))
                for start in range(0, length, step)
            ]
            seconds += _apply(subject, group, events)
            num_stored += length
    result = {
        "bytes_per_block": (_rss_bytes() - before) / (num_chains * CHAIN_BLOCKS),
        "stored_per_s": num_stored / seconds,
    }
    draw = random.Random(1)
    for num_prompt_blocks in PROMPT_BLOCKS:
        queries = []
        for index in range(NUM_SLOW_LOOKUPS if whole_prompts else NUM_LOOKUPS):
            number = draw.randrange(1, num_chains)
            chain = _chain(number)[: HASH * num_prompt_blocks]
            if index % 2:  # The other half of the prompt was never seen.
                chain = chain[: HASH * (num_prompt_blocks // 2)] + draw.randbytes(
                    HASH * (num_prompt_blocks - num_prompt_blocks // 2)
                )
            queries.append(subject.query(chain))
            if index == 1 and not whole_prompts:
                assert max(subject.look_up(queries[-1]).values()) == num_prompt_blocks // 2
        _add_times(result, f"look_up_{num_prompt_blocks}", subject.look_up, queries)
        if hasattr(subject, "lengths"):
            _add_times(result, f"lengths_{num_prompt_blocks}", subject.lengths, queries)
    popular = subject.query(_chain(0))
    found = subject.look_up(popular)
    assert len(found) == num_groups, len(found)
    _add_times(
        result, "look_up_popular", subject.look_up, [popular] * (10 if whole_prompts else 50)
    )
    if hasattr(subject, "lengths"):
        _add_times(result, "lengths_popular", subject.lengths, [popular] * 50)
    for what in ("decide", "hash_only"):
        for count in PROMPT_TOKENS:
            if hasattr(subject, what):
                prompts = [subject.tokens(count)] * 50
                _add_times(result, f"{what}_{count}", getattr(subject, what), prompts)
    if not whole_prompts:
        _add_changes(result, subject, num_chains, num_groups)
    return result


def _add_changes(result: dict[str, float], subject: Any, num_chains: int, num_groups: int) -> None:
    """Takes ends of chains away, and puts and takes more, in events of many and of one block."""
    for size in (EVENT_BLOCKS, 1):
        times = {"removed": 0.0, "mixed": 0.0}
        num_blocks = 0
        for number in range(1, min(num_chains, 60)):
            chain = _chain(number)
            group, length = next(_holders(number, num_chains, num_groups))
            start = length - (2048 if size > 1 else 64)
            spans = [(at, at + size) for at in range(start, length, size)]
            removed = [subject.removed(group, chain, *span) for span in reversed(spans)]
            times["removed"] += _apply(subject, group, removed)
            mixed = []
            for span in spans:
                mixed.append(subject.stored(group, chain, *span))
                mixed.append(subject.removed(group, chain, *span))
                mixed.append(subject.stored(group, chain, *span))
            times["mixed"] += _apply(subject, group, mixed)
            num_blocks += length - start
        suffix = "" if size > 1 else "_one_by_one"
        result[f"removed_per_s{suffix}"] = num_blocks / times["removed"]
        result[f"mixed_per_s{suffix}"] = 3 * num_blocks / times["mixed"]


def _holders(number: int, num_chains: int, num_groups: int) -> Iterator[tuple[int, int]]:
    """Groups and how much of a chain each holds."""
    if number == 0:
        yield from ((group, CHAIN_BLOCKS) for group in range(num_groups))
        return
    num_holders = min(1 + number % 4, num_groups)
    for holder in range(num_holders):
        length = CHAIN_BLOCKS * (num_holders - holder) // num_holders
        yield (number * 7 + holder * 3) % num_groups, length


def _chain(number: int) -> bytes:
    return random.Random(number).randbytes(HASH * CHAIN_BLOCKS)


def _numbers(data: bytes) -> list[int]:
    return list(memoryview(data).cast("Q")[::4]) if data else []


def _words(data: bytes) -> list[int]:
    return list(memoryview(data).cast("H"))


def _dynamo(data: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode()


def _apply(subject: Any, group: int, events: list[Any]) -> float:
    begin = time.perf_counter()
    for event in events:
        subject.apply(group, event)
    if hasattr(subject, "settle"):
        subject.settle()
    return time.perf_counter() - begin


def _add_times(
    result: dict[str, float], name: str, work: Callable[[Any], object], arguments: list[Any]
) -> None:
    """In microseconds. The first few calls only warm up."""
    for argument in arguments[:5]:
        work(argument)
    times = []
    for argument in arguments:
        _touch(argument)
        begin = time.perf_counter_ns()
        work(argument)
        times.append((time.perf_counter_ns() - begin) / 1000)
    times.sort()
    result[f"{name}_p50_us"] = statistics.median(times)
    result[f"{name}_p99_us"] = times[len(times) * 99 // 100]


def _touch(argument: Any) -> None:
    """A prompt is looked up when it was just hashed: it is in the CPU's cache."""
    data = getattr(argument, "data", None)
    if isinstance(data, bytes):
        zlib.crc32(data)  # Unlike a copy, leaves memory and its translation as they were.
    elif isinstance(argument, list):
        sum(argument)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
