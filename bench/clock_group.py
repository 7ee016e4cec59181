"""A group whose engine is a clock, a gateway in front of it, and processes that serve them."""

import asyncio
import multiprocessing
import secrets
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

from quire import demo_model
from quire.cluster.group.engine_loop import EngineLoop, Sink, StepResult
from quire.cluster.group.service import GroupService, build_group_server
from quire.cluster.links.group_link import GroupContact, grpc_connect
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.cluster.serving.models import Models
from quire.cluster.serving.service import ModelService
from quire.router.table import RoutingTable
from quire.v1 import group_pb2
from quire.worker.api.engine_stats import EngineStats
from quire.worker.api.errors import RankFailure
from quire.worker.api.events import EventLog
from quire.worker.api.outputs import TokenDelta
from quire.worker.api.request import Prepared
from quire.worker.text.tokenizer import Tokenizer

_BLOCK_SIZE = 16
_LOAD = dict.fromkeys(EngineStats.__dataclass_fields__, 0)


class Child:
    """A process that serves until it is left."""

    def __init__(self, run: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, *arguments), daemon=True)

    def __enter__(self) -> "Child":
        self._process.start()
        said: GroupContact | str = self._pipe.recv()
        self.contact = GroupContact(address=said) if isinstance(said, str) else said
        self.address = self.contact.address
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("end")
        self._process.join()

    def ask(self, message: object) -> Any:
        """The process's answer to ``message``."""
        self._pipe.send(message)
        return self._pipe.recv()


def run_clock_group(pipe: Connection, step_s: float, max_model_len: int) -> None:
    """The `Child` that is a group; each request gets a token in each step."""

    async def run() -> None:
        engine_loop = ClockEngine(step_s)
        description = group_pb2.GroupDescription(
            group_id="g0",
            epoch=1,
            model=demo_model.NAME,
            model_fingerprint="clock",
            kv_dtype="float32",
            block_size=_BLOCK_SIZE,
            max_model_len=max_model_len,
            vocab_size=4096,
        )
        token = secrets.token_urlsafe(32)
        service = GroupService(cast(EngineLoop, engine_loop), description)
        stepping = asyncio.create_task(engine_loop.run())
        server = build_group_server(service, token=token)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(GroupContact(address=f"127.0.0.1:{port}", token=token))
        await asyncio.to_thread(pipe.recv)
        await server.stop(None)
        stepping.cancel()

    asyncio.run(run())


async def gateway_of(group: GroupContact, tokenizer: Tokenizer) -> tuple[Models, Groups]:
    """A gateway that has found the group. The groups are the caller's to close."""
    table = RoutingTable(block_size=_BLOCK_SIZE)
    expected = Expectation(model=demo_model.NAME, block_size=_BLOCK_SIZE)
    connect = partial(grpc_connect, contacts={group.address: group})
    groups = Groups(table=table, expected=expected, connect=connect)
    groups.set_addresses([group.address])
    gateway = ModelService(model=demo_model.NAME, tokenizer=tokenizer, groups=groups, table=table)
    while not groups.num_ready:
        await groups.wait_for_change(timeout_s=10)
    return Models(gateway), groups


class ClockEngine:
    """An `EngineLoop` as far as a `GroupService` sees it, without an engine."""

    def __init__(self, step_s: float) -> None:
        self.num_steps = self.num_submitted = self.num_added = 0
        self.stats = EngineStats(**cast(Any, _LOAD))
        self.failed: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
        self._step_s = step_s
        self._events = EventLog(epoch=1)
        self._running: dict[str, tuple[Sink, int, int]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def submit(self, request: Prepared, sink: Sink) -> None:
        assert request.sampling.max_tokens is not None
        self.num_submitted = self.num_added = self.num_submitted + 1
        self._running[request.request_id] = (sink, 0, request.sampling.max_tokens)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def listen(self, on_step: Callable[[StepResult], None]) -> Callable[[], None]:
        return lambda: None

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(SimpleNamespace(events=self._events))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self.num_steps += bool(self._running)
            for request_id, (sink, num_tokens, max_tokens) in list(self._running.items()):
                is_last = num_tokens + 1 == max_tokens
                token_ids = (69 + num_tokens % 26,)  # Letters of the demo model.
                reason = "length" if is_last else None
                sink(TokenDelta(request_id, num_tokens, token_ids, (), cast(Any, reason), 0))
                if is_last:
                    del self._running[request_id]
                else:
                    self._running[request_id] = (sink, num_tokens + 1, max_tokens)
