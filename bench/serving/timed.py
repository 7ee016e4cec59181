"""Groups and gateways that keep what they did and when, and hand it over when they stop.

A group keeps each step: when it began and ended, the CPU time of the thread that ran it, and what
was in it. Group and gateway keep when each request passed them. Seconds are those of the system's
monotonic clock, which processes of one machine share, the client among them.

Both write a file of JSON lines into a folder, so that nothing of it disturbs the run.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.cluster.config import ClusterConfig
from quire.cluster.deployments import Gateway, ReplicaGroup
from quire.cluster.gateway.generation import Generation, GenerationRequest
from quire.cluster.gateway.service import Gateway as GatewayService
from quire.cluster.group.engine_loop import EngineLoop, Sink
from quire.router.policy import Decision
from quire.router.table import RoutingTable
from quire.worker.engine import Engine
from quire.worker.errors import QuireError
from quire.worker.request import Request, TokenDelta
from quire.worker.schedule import Schedule

Line = dict[str, Any]


def timed_group(folder: Path) -> type[ReplicaGroup]:
    """A group class for `quire.cluster.app.running_app`."""

    class TimedGroup(ReplicaGroup):
        async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
            await super().__init__(config)
            self._kept = GroupTimes(self._server._engine_loop, self._server._engine)

        async def __del__(self) -> None:
            write_lines(folder / f"group-{self._group_id}.jsonl", self._kept.lines)
            await super().__del__()

    return TimedGroup


def timed_gateway(folder: Path, base: type[Gateway] = Gateway) -> type[Gateway]:
    """The same for gateways that are like ``base`` otherwise."""

    class TimedGateway(base):  # type: ignore[misc, valid-type]
        async def __init__(self, config: ClusterConfig, groups: Any) -> None:  # type: ignore[misc]
            await super().__init__(config, groups)
            self._kept = GatewayTimes(self._server.gateway, self._server.table)

        async def __del__(self) -> None:
            write_lines(folder / f"gateway-{id(self)}.jsonl", self._kept.lines)
            await super().__del__()

    return TimedGateway


class GroupTimes:
    """Watches one group's engine from now on."""

    def __init__(self, loop: EngineLoop, engine: Engine) -> None:
        self._requests: dict[str, Line] = {}
        self._steps: list[Line] = []
        self._schedule: Schedule | None = None
        self._context = self._products = 0
        _wrap(loop, "submit", self._submit)
        _wrap(engine, "add_request", self._add)
        _wrap(engine, "step", self._step)
        _wrap(engine._scheduler, "schedule", self._choose)

    @property
    def lines(self) -> list[Line]:
        return [*self._steps, *self._requests.values()]

    def _submit(
        self, submit: Callable[[Request, Sink], None], request: Request, sink: Sink
    ) -> None:
        line = self._requests[request.request_id] = {
            "kind": "request",
            # The gateway's number, its name for the request, the attempt, and a number of ours.
            "request": request.request_id.split("/")[1],
            "came_s": time.monotonic(),
        }

        def told(output: TokenDelta | QuireError) -> None:
            line.setdefault("told_s", time.monotonic())
            sink(output)

        submit(request, told)

    def _add(self, add: Callable[[Request], None], request: Request) -> None:
        self._requests[request.request_id]["added_s"] = time.monotonic()
        add(request)

    def _choose(self, schedule: Callable[[], Schedule]) -> Schedule:
        chosen = self._schedule = schedule()
        rows = zip(chosen.sequences, chosen.num_tokens, strict=True)
        computed = [(seq.num_computed, num_tokens) for seq, num_tokens in rows]
        self._context = sum(before for before, _ in computed[: chosen.num_decodes])
        self._products = sum(
            before * num_tokens for before, num_tokens in computed[chosen.num_decodes :]
        )
        return chosen

    def _step(self, step: Callable[[], list[TokenDelta]]) -> list[TokenDelta]:
        begin_s, cpu_s = time.monotonic(), time.thread_time()
        outputs = step()
        end_s, cpu_s = time.monotonic(), time.thread_time() - cpu_s
        chosen = self._schedule
        assert chosen is not None
        self._steps.append(
            {
                "kind": "step",
                "begin_s": begin_s,
                "end_s": end_s,
                "cpu_s": cpu_s,
                "prefill": sum(chosen.num_tokens[chosen.num_decodes :]),
                "products": self._products,
                "decodes": chosen.num_decodes,
                "context": self._context,
            }
        )
        for seq in chosen.sequences:
            line = self._requests.get(seq.request_id)
            if line is not None and "began_s" not in line:
                line["began_s"] = begin_s
        for output in outputs:
            line = self._requests.get(output.request_id)
            if line is not None and "first_s" not in line:
                line["first_s"] = end_s
        return outputs


class GatewayTimes:
    """Watches one gateway from now on."""

    def __init__(self, gateway: GatewayService, table: RoutingTable) -> None:
        self._requests: dict[str, Line] = {}
        _wrap(gateway, "prepare", self._prepare)
        _wrap(table, "route", self._route)
        _wrap(table, "started", self._started)

    @property
    def lines(self) -> list[Line]:
        return list(self._requests.values())

    async def _prepare(self, prepare: Any, request: GenerationRequest) -> Generation:
        generation: Generation = await prepare(request)
        # The one completion of it that is asked for here.
        name = f"{generation.request_id}-0"
        self._requests[name] = {
            "kind": "gateway",
            "request": name,
            "arrived_s": generation.arrival_s,
            "prepared_s": time.monotonic(),
        }
        return generation

    def _route(self, route: Callable[..., Decision], request_id: str, **options: Any) -> Decision:
        decision = route(request_id, **options)
        self._requests[request_id]["routed_s"] = time.monotonic()
        return decision

    def _started(
        self, started: Callable[..., None], request_id: str, *, num_cached_tokens: int
    ) -> None:
        self._requests[request_id]["started_s"] = time.monotonic()
        started(request_id, num_cached_tokens=num_cached_tokens)


def write_lines(file: Path, lines: Sequence[Line]) -> None:
    """All or nothing: whoever finds the file finds it whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.rename(file)


def read_lines(folder: Path) -> list[Line]:
    """What all groups and gateways of a run wrote; a group's lines say which one's they are."""
    return [
        {"by": file.stem, **json.loads(text)}
        for file in sorted(folder.glob("*.jsonl"))
        for text in file.read_text().splitlines()
    ]


def _wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """From now on ``function`` is called in place of the method, and given it to call."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
