"""Groups with real engines, in this process and in others, for the tests of `bench.kv`.

A group in another process is remote-controlled: between its own work it runs functions that the
caller sends, and returns their results.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.features.kv_exchange.peers import Peers
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact
from quire.worker.bench.sweep import token_bytes
from quire.worker.blocks.hashing import BlockHashes, TokenIds
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.transfers import Transfers
from quire.worker.request.config import EngineConfig
from quire.worker.request.outputs import Fetched
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_TOKENS = 3
"""Length of each answer, unless told otherwise."""
_NAMES = itertools.count()

P = ParamSpec("P")
T = TypeVar("T")

Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens and their log-probabilities."""


class Said(NamedTuple):
    """A group's answer to a prompt."""

    answer: Answer
    first_s: float
    """Time to first token."""
    fetched: Fetched
    num_cached_tokens: int


def config_of(**engine: Any) -> ClusterConfig:
    """Settings of one group; the demo model unless told otherwise."""
    options = {
        "model": demo_model.PATH,
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
        "kv_transfer": False,
        **engine,
    }
    return ClusterConfig(engine=EngineConfig(**options))


def gib_of(num_blocks: int, config: ClusterConfig) -> float:
    """GiB that so many blocks take up outside the cache, and a little more."""
    return (num_blocks + 0.5) * token_bytes(config.engine) * config.engine.block_size / 2**30


@contextlib.asynccontextmanager
async def running(config: ClusterConfig, name: str) -> AsyncIterator[GroupServer]:
    """A group in this process."""
    group = await GroupServer.start(config, group_id=name)
    try:
        yield group
    finally:
        await group.stop(drain_timeout_s=0)


async def ask(
    group: GroupServer,
    prompt: TokenIds,
    source: PeerSource | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    cache_salt: str = "",
) -> Said:
    """What ``group`` says to a prompt; one with a new ``cache_salt`` is nowhere cached."""
    request = Prepared(
        request_id=f"bench-{next(_NAMES)}",
        prompt_token_ids=prompt,
        sampling=SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, seed=1
        ),
        source=source,
        cache_salt=cache_salt,
    )
    loop = asyncio.get_running_loop()
    begin_s, first_s = loop.time(), 0.0
    fetched, num_cached_tokens = Fetched(), 0
    tokens, logprobs = list[int](), list[float]()
    async for delta in group.generate(request):
        if not tokens:
            first_s = loop.time() - begin_s
            fetched, num_cached_tokens = delta.fetched or fetched, delta.num_cached_tokens
        tokens += delta.token_ids
        logprobs += [each.logprob for each in delta.logprobs]
    return Said((tuple(tokens), tuple(logprobs)), first_s, fetched, num_cached_tokens)


async def answers(group: GroupServer, prompts: Sequence[TokenIds]) -> list[Answer]:
    """Answers to prompts that are sent at once."""
    return [said.answer for said in await asyncio.gather(*[ask(group, each) for each in prompts])]


def engine_of(group: GroupServer) -> GroupEngine:
    return group._engine


def transfers_of(group: GroupServer) -> Transfers:
    transfers = group._engine.transfers
    assert transfers is not None, "its blocks do not leave its cache"
    return transfers


def peers_of(group: GroupServer) -> Peers:
    assert group._peers is not None, "it has nothing to do with other groups"
    return group._peers


async def in_engine(group: GroupServer, function: Callable[[GroupEngine], T]) -> T:
    """Runs ``function`` in the engine's thread, between two steps."""
    return await group._engine_loop.call(function)


def names_of(group: GroupServer, prompt: TokenIds) -> BlockHashes:
    """The names of the prompt's blocks, but for one that its last token fills."""
    engine = group._engine
    chain = Prepared(request_id="", prompt_token_ids=prompt, sampling=SamplingParams(seed=1)).chain(
        model_fingerprint=engine._model.fingerprint,
        numerics=engine._executor.numerics,
        kv_dtype=engine._model.kv_dtype,
        block_size=engine._config.block_size,
    )
    return BlockHashes.of(chain.extend(prompt))[: (len(prompt) - 1) // BLOCK_SIZE]


def source_of(contact: GroupContact, prompt: TokenIds, *, group_id: str) -> PeerSource:
    """A group that has all of a prompt's full blocks."""
    return PeerSource(group_id=group_id, **contact.metadata(), num_blocks=len(prompt) // BLOCK_SIZE)


class RemoteFailed(Exception):
    """A function failed in another process; the message says how."""


class Remote:
    """A group in a process of its own, which runs while the context is entered."""

    def __init__(self, config: ClusterConfig, name: str) -> None:
        self.name = name
        self._config = config
        self._process: SpawnProcess | None = None

    async def __aenter__(self) -> "Remote":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.end)

    async def start(self) -> None:
        """Starts the group again, after `kill`."""
        if self._process is not None:
            await asyncio.to_thread(self.end)
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(self._config, self.name, theirs)
        )
        self._process.start()
        theirs.close()
        self.contact: GroupContact = await self._answer()

    async def call(
        self,
        function: Callable[Concatenate[GroupServer, P], Awaitable[T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """What ``function`` of the group returns there. One call at a time.

        Raises:
            RemoteFailed: It raised, or the process has ended.
        """
        self._pipe.send((function, args, options))
        result: T = await self._answer()
        return result

    def source(self, prompt: TokenIds, *, contact: GroupContact | None = None) -> PeerSource:
        """Where to fetch ``prompt``, which it has computed. ``contact`` is another way to it."""
        return source_of(contact or self.contact, prompt, group_id=self.name)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        assert self._process.pid is not None, "it was not started"
        return self._process.pid

    def kill(self) -> None:
        """Kills the process at once, without a shutdown."""
        os.kill(self.pid, signal.SIGKILL)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        assert self._process is not None, "it was not started"
        self._pipe.close()
        self._process.join(30)
        self._process.kill()
        self._process.join()

    async def _answer(self) -> Any:
        try:
            result, error = await asyncio.to_thread(self._pipe.recv)
        except (EOFError, OSError) as ended:
            raise RemoteFailed(f"{self.name}: its process has ended") from ended
        if error:
            raise RemoteFailed(f"{self.name}: {error}")
        return result


def _serve(config: ClusterConfig, name: str, pipe: "Connection[Any, Any]") -> None:
    """The other process: does what it is told, until the pipe is closed."""

    async def serve() -> None:
        async with running(config, name) as group:
            pipe.send((group.contact, ""))
            while True:
                try:
                    function, args, options = await asyncio.to_thread(pipe.recv)
                except EOFError:
                    return
                try:
                    pipe.send((await function(group, *args, **options), ""))
                except Exception as error:
                    pipe.send((None, repr(error)))

    logging.getLogger("quire").addHandler(logging.NullHandler())  # Faults are intended.
    try:
        asyncio.run(serve())
    except Exception as error:
        pipe.send((None, repr(error)))


def altered(
    folder: Path, model: Path = demo_model.PATH, *, weights: bool = False, **entries: Any
) -> Path:
    """A copy of a model in ``folder``, with other ``entries`` in its config.json, and where it says
    so with one weight that is another."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | entries))
    if weights:
        tensors = load_file(model / "model.safetensors")
        tensors[min(tensors)].view(-1)[0] += 1
        (folder / "model.safetensors").unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_prompt(rng: np.random.Generator, num_tokens: int, *, vocab_size: int = 4096) -> TokenIds:
    return rng.integers(5, vocab_size, num_tokens).astype(np.uint32)
