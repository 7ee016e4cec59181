"""A whole cluster in one process, without Ray: groups, gateway, gRPC and HTTP over loopback.

The engines are real; their model is a hash. Its "KV" of a token is the token itself, read back
through the block table, and the next token is a function of all that it read, of the seed, of the
adapter's digest and of nothing else: `HashModel.continuation` says from the prompt alone what a
correct cluster answers.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import tokenizers
import trustme
import uvicorn.server
from openai import AsyncOpenAI
from tests.direct_executor import DirectExecutor
from tests.steps import banned_ids, samples

from quire.cluster.deploy.gateway_server import tell_of_tenants
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.edge.grpc_server import build_grpc_server
from quire.cluster.edge.openai_http import build_http_app
from quire.cluster.features.adapters.group import Check, GroupAdapters
from quire.cluster.features.guard import leaving
from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.guard.listener import HttpListener, listening_socket
from quire.cluster.features.installed import INSTALLED
from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.cluster.features.kv_exchange.peers import Peers
from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.gateway.models import MAX_BODY_BYTES, Models
from quire.cluster.gateway.prepare import Abilities
from quire.cluster.gateway.service import ModelService
from quire.cluster.group.engine_loop import EngineLoop
from quire.cluster.group.service import GroupService, build_group_server
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.wire import format_to_proto
from quire.router.config import RoutingConfig
from quire.router.table import RoutingTable
from quire.v1 import group_pb2, inference_pb2_grpc
from quire.worker.group_engine import GroupEngine
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.adapters.peft import read_config
from quire.worker.parts.adapters.reading import Read
from quire.worker.parts.adapters.store import AdapterStore, Held
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import InvalidRequest, RankFailure
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.text.tokenizer import Tokenizer

BLOCK_SIZE = 4
MAX_MODEL_LEN = 400
MODEL = "hash"
PATIENT = AdmissionConfig(max_queue_wait_s=1000)

_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{{ message.tool_call_id }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class _HurriedAsyncio:
    """asyncio with 20 times shorter sleeps: uvicorn polls for its stop ten times a second."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)


@pytest.fixture(scope="session", autouse=True)
def hurried_listeners() -> Iterator[None]:
    """HTTP listeners stop without waiting for late clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaving, "HANDSHAKE_S", 0.0)
        patch.setattr(uvicorn.server, "asyncio", _HurriedAsyncio())
        yield


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients trust one test CA, so that none of them loads the system's many."""
    path = tmp_path_factory.mktemp("authority") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and that is that"] * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@dataclass
class HashModel:
    """A model that draws letters and, rarely, the end token by a hash of context and seed.

    Only a seed that a test gave ends a text. A request without one gets a seed of 63 bits from the
    gateway, and would end at a random length."""

    tokenizer: Tokenizer
    eos: int = field(init=False)
    letters: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.eos = self.tokenizer.encode("<|end|>")[0]
        self.letters = [
            self.tokenizer.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz ."
        ]

    def next_token(
        self, context: Sequence[int], *, seed: int, banned: Sequence[int] = (), adapter: str = ""
    ) -> int:
        text = f"{list(context)}/{seed}{adapter}".encode()
        for attempt in itertools.count():
            digest = hashlib.blake2b(text + attempt.to_bytes(4, "little"), digest_size=8).digest()
            number = int.from_bytes(digest, "little")
            ends = number % 100 == 0 and seed < 2**32
            token = self.eos if ends else self.letters[number % len(self.letters)]
            if attempt >= 200:  # A constraint may allow no letter.
                token = number % self.tokenizer.vocab_size
            if token not in banned:
                return token
        raise AssertionError

    def continuation(
        self,
        prompt: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        ignore_eos: bool = True,
        adapter: str = "",
    ) -> list[int]:
        context = list(prompt)
        for _ in range(max_tokens):
            context.append(self.next_token(context, seed=seed, adapter=adapter))
            if context[-1] == self.eos and not ignore_eos:
                break
        return context[len(prompt) :]


class HashExecutor(DirectExecutor):
    """Runs steps of `HashModel`; ``step_s`` slows each of them down."""

    def __init__(self, model: HashModel, *, num_blocks: int, host_kv_bytes: int = 0) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, host_kv_bytes=host_kv_bytes)
        self.step_s = 0.0
        self.fails = False
        self.breaks_at: int | None = None
        """If set, logits of contexts with this token are NaN."""
        self.num_steps = 0
        self._model = model
        self._slots = self.kv_NLW.reshape(-1)
        self._adapters = {-1: ""}

    def execute(self, step: StepInput) -> StepOutput:
        if self.fails:
            raise RankFailure("rank 1 died")
        if not len(step.token_ids_T):  # The step only copies.
            return StepOutput(np.empty(0, dtype=np.int64))
        self.num_steps += 1
        time.sleep(self.step_s)
        self._adapters.update(step.adapter_loads)
        slots_B = step.adapter_slots_A.tolist() or [-1] * len(step.seq_lens_B)
        self._slots[step.slot_mapping_T] = step.token_ids_T
        token_ids, broken_rows = [], []
        for sample, row, length in samples(step):
            positions = np.arange(length)
            blocks = step.block_tables_BM[row][positions // BLOCK_SIZE].astype(np.int64)
            context = self._slots[blocks * BLOCK_SIZE + positions % BLOCK_SIZE].tolist()
            if self.breaks_at in context:
                broken_rows.append(sample)
            banned = banned_ids(step.sampling, sample)
            seed = int(step.sampling.seed_S[sample])
            adapter = self._adapters[slots_B[row]]
            token = self._model.next_token(context, seed=seed, banned=banned, adapter=adapter)
            token_ids.append(token)
        token_ids = step.sampling.with_given(np.array(token_ids, dtype=np.int64)).tolist()
        wanted = step.sampling.num_logprobs_S.tolist()
        asked = step.sampling.asked or {}
        logprobs = tuple(
            _logprobs(token, number, asked.get(sample, ())) if number >= 0 else None
            for sample, (token, number) in enumerate(zip(token_ids, wanted, strict=True))
        )
        return StepOutput(np.array(token_ids, dtype=np.int64), logprobs, tuple(broken_rows))

    def close(self) -> None:
        pass


def _logprobs(token_id: int, num_top: int, asked: Sequence[int]) -> TokenLogprobs:
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(num_top))
    top += tuple((token, -9.0) for token in asked)
    return TokenLogprobs(token_id, -0.5, 1, top)


@dataclass
class Clock:
    """The real clock, which a test can advance so that deadlines pass."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@dataclass
class Group:
    """A replica group with its gRPC server."""

    name: str
    executor: HashExecutor
    engine: GroupEngine
    engine_loop: EngineLoop
    service: GroupService
    server: grpc.aio.Server
    address: str
    peers: Peers | None = None

    async def kill(self) -> None:
        """Breaks every connection at once, as a killed process would."""
        await self.server.stop(None)
        if self.peers is not None:
            await self.peers.close()

    async def close(self) -> None:
        await self.kill()
        await self.engine_loop.close()

    async def settle(self) -> None:
        """Returns once the engine has no requests; pytest's timeout is the limit.

        Waiting requests hold no blocks, so a count of held blocks alone would not show them.
        """
        while self.engine_loop.num_requests or await self._num_held_blocks():
            await asyncio.sleep(0.01)

    async def _num_held_blocks(self) -> int:
        """Held blocks plus requests, since some may arrive during the call of the engine."""
        stats = await self.engine_loop.call(lambda engine: engine.stats())
        return stats.num_held_blocks + self.engine_loop.num_requests


@dataclass
class Cluster:
    """Groups, and a gateway in front of them."""

    model: HashModel
    groups: dict[str, Group]
    table: RoutingTable
    connections: Groups
    gateway: ModelService
    models: Models
    clock: Clock
    """The gateway's clock."""
    grpc_address: str = ""
    http_url: str = ""
    inference: "inference_pb2_grpc.InferenceAsyncStub" = field(init=False)
    openai: AsyncOpenAI = field(init=False)

    def take_steps_of(self, step_s: float) -> None:
        """Sets the duration of each step. Slow steps keep a request running until the test has
        acted on it, even on a busy machine."""
        for group in self.groups.values():
            group.executor.step_s = step_s

    async def wait_ready(self, num_groups: int) -> None:
        while self.connections.num_ready != num_groups:
            await self.connections.wait_for_change(timeout_s=5)


def held_in(store: AdapterStore) -> Read:
    """Reads adapters of rank 64 at most, all of which the hash model accepts."""

    def read(digest: str) -> Held:
        held = store.hold(digest)
        if held is None:
            raise InvalidRequest(f"adapter={digest!r} is not here")
        rank = read_config(held.folder).rank
        if rank > 64:
            raise InvalidRequest(f"adapter: rank {rank} is above 64")
        return held

    return read


def checked_in(store: AdapterStore) -> Check:
    async def check(digest: str) -> None:
        held_in(store)(digest).release()

    return check


StartGroup = Callable[..., contextlib.AbstractAsyncContextManager[Group]]
StartCluster = Callable[..., contextlib.AbstractAsyncContextManager[Cluster]]


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> HashModel:
    return HashModel(tokenizer)


@pytest.fixture(scope="session")
def start_group(model: HashModel) -> StartGroup:
    epochs = itertools.count(1)

    @contextlib.asynccontextmanager
    async def start(
        name: str = "g0",
        *,
        num_blocks: int = 200,
        model_len: int = MAX_MODEL_LEN,
        description: dict[str, Any] | None = None,
        service: dict[str, Any] | None = None,
        store: AdapterStore | None = None,
        **options: Any,
    ) -> AsyncIterator[Group]:
        config = EngineConfig(
            **{
                "model": Path("none"),
                "block_size": BLOCK_SIZE,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 64,
                **options,
            }
        )
        executor = HashExecutor(
            model, num_blocks=num_blocks, host_kv_bytes=config.host_kv_bytes and 1
        )
        borrower = Borrower() if config.kv_transfer else None
        facts = ModelFacts(
            name=MODEL,
            fingerprint="hash-1",
            vocab_size=model.tokenizer.vocab_size,
            max_model_len=model_len,
            eos_token_ids=(model.eos,),
            kv_dtype="float32",
        )
        epoch = next(epochs)
        reads: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        if store is not None:
            reads = {"read_adapter": held_in(store)}
            kept = {"adapters": GroupAdapters(store, checked_in(store))}
        engine = GroupEngine(
            config,
            facts,
            executor,
            epoch=epoch,
            load_tokenizer=lambda: model.tokenizer,
            fetch=borrower.fetch if borrower else None,
            **reads,
        )
        engine_loop = EngineLoop(engine)
        peers = None
        if borrower is not None:
            peers = Peers(
                borrower,
                engine_loop.call,
                engine_loop.lend_kept,
                format=executor.kv_format,
                host="127.0.0.1",
                tls=None,
            )
            kept["peers"] = peers
        said: dict[str, Any] = {
            "group_id": name,
            "epoch": epoch,
            "model": MODEL,
            "model_fingerprint": facts.fingerprint,
            "kv_dtype": facts.kv_dtype,
            "block_size": BLOCK_SIZE,
            "max_model_len": engine.max_model_len,
            "vocab_size": facts.vocab_size,
            "num_blocks": num_blocks,
            "max_num_seqs": config.max_num_seqs,
            "eos_token_ids": facts.eos_token_ids,
            "task": facts.task,
            "kv_events": config.kv_events,
            "kv_format": format_to_proto(executor.kv_format) if peers else None,
            **(description or {}),
        }
        group_service = GroupService(
            engine_loop,
            group_pb2.GroupDescription(**said),
            **{"heartbeat_s": 0.05, "events_heartbeat_s": 0.1, **kept, **(service or {})},
        )
        server = build_group_server(group_service)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        group = Group(
            name, executor, engine, engine_loop, group_service, server, f"127.0.0.1:{port}", peers
        )
        try:
            yield group
        finally:
            await group.close()
            engine.close()

    return start


@pytest.fixture(scope="session")
def start_cluster(model: HashModel, start_group: StartGroup) -> StartCluster:
    @contextlib.asynccontextmanager
    async def start(
        *,
        num_groups: int = 2,
        group_wait_s: float = 60.0,
        config: dict[str, Any] | None = None,
        expected: dict[str, Any] | None = None,
        client: dict[str, Any] | None = None,
        keys: ApiKeys | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        keeper: Any = None,
        stores: Sequence[AdapterStore | None] = (None,),
        routing: RoutingConfig | None = None,
        **options: Any,
    ) -> AsyncIterator[Cluster]:
        async with contextlib.AsyncExitStack() as stack:
            started = [
                await stack.enter_async_context(
                    start_group(f"g{number}", store=stores[number % len(stores)], **options)
                )
                for number in range(num_groups)
            ]
            table = RoutingTable(block_size=BLOCK_SIZE, config=routing)
            connections = Groups(
                table=table,
                expected=Expectation(
                    **{"model": MODEL, "block_size": BLOCK_SIZE, **(expected or {})}
                ),
                config=GroupClientConfig(
                    **{"silence_timeout_s": 2, "min_backoff_s": 0.02, **(client or {})}
                ),
                adapter_folder=keeper.folder if keeper else lambda digest: None,
            )
            stack.push_async_callback(connections.close)
            connections.set_addresses(group.address for group in started)
            clock = Clock()
            gateway = ModelService(
                model=MODEL,
                tokenizer=model.tokenizer,
                groups=connections,
                table=table,
                abilities=Abilities(keeper=keeper),
                config=GatewayConfig(
                    completion=CompletionConfig(group_wait_s=group_wait_s),
                    # Long predicted waits refuse nothing, unless a test configures that.
                    **{"admission": PATIENT, **(config or {})},
                ),
                clock=clock,
            )
            stack.callback(gateway.close)
            groups = {group.name: group for group in started}
            models = Models(gateway, max_body_bytes=max_body_bytes)
            cluster = Cluster(model, groups, table, connections, gateway, models, clock)
            await _serve(cluster, stack, keys)
            if expected is None:
                await cluster.wait_ready(num_groups)
            yield cluster

    return start


async def _serve(cluster: Cluster, stack: contextlib.AsyncExitStack, keys: ApiKeys | None) -> None:
    if keys is not None:
        tell_of_tenants(cluster.models, keys)
    server = build_grpc_server(cluster.models, features=INSTALLED, keys=keys)
    cluster.grpc_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, None)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.grpc_address))
    cluster.inference = inference_pb2_grpc.InferenceStub(channel)

    app = build_http_app(
        cluster.models, features=INSTALLED, keys=keys, allow_origins=["http://localhost:3000"]
    )
    http = HttpListener(
        app, limits=ConnectionLimits(), drain_timeout_s=0, finish=cluster.models.finished
    )
    listener = listening_socket("127.0.0.1", 0, is_shared=False)
    port = listener.getsockname()[1]
    http.start(listener)
    stack.push_async_callback(http.stop)
    cluster.http_url = f"http://127.0.0.1:{port}"
    cluster.openai = AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0)
    stack.push_async_callback(cluster.openai.close)
