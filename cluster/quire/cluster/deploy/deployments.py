"""The deployments of a Quire application, as Ray Serve runs them: gateways, each model's groups.

Serve starts, replaces and counts them and tells each gateway which groups run. Requests and tokens
do not pass through Serve: groups and gateways have servers of their own.
"""

import asyncio
import contextlib
import gc
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from typing import Any, cast

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer, new_table
from quire.cluster.deploy.line import drain_when_told
from quire.cluster.deploy.logs import log_beside_serve
from quire.cluster.deploy.port_claims import claim_ports
from quire.cluster.deploy.serve_port import keep_to_node_address
from quire.cluster.deploy.start_steps import StartSteps
from quire.cluster.deploy.watched import be_watched
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact
from quire.cluster.scaling.demand import Demand
from quire.cluster.scaling.serve import report
from quire.cluster.serving.adapters import Adapters, Word, nobody_knows
from quire.cluster.supervise import end_if_cancelled
from quire.cluster.telemetry.explanations import Answers
from quire.router.registry import REGISTRY, Member
from quire.router.table import RoutingTable
from quire.v1 import inference_pb2 as pb
from quire.worker.api.hashing import as_token_ids
from quire.worker.api.outputs import TokenDelta
from quire.worker.api.request import Prepared
from quire.worker.api.sampling_params import SamplingParams


def pool_of(model: str) -> str:
    """Under which the request router publishes a model's groups to the gateways of its process."""
    return f"replica_groups/{model}"


_log = logging.getLogger(__name__)

_DEMAND_REPORT_S = 0.5
_DEMAND_KEPT_S = 2.0
_RECALL_TIMEOUT_S = 3.0
"""In which all gateways are to say what they know of a request, or of adapters."""
_ASKS = 3
_ASK_AGAIN_S = 0.5
_LEARN_AGAIN_S = 5.0


class ReplicaGroup:
    """A Serve replica that is one replica group."""

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        self._at_end = contextlib.AsyncExitStack()  # First: `__del__` follows a failed start too.
        log_beside_serve()
        keep_to_node_address()
        if config.group_host == "auto":
            config = replace(config, group_host=ray.util.get_node_ip_address())
        self._config = config
        self._demand: dict[str, tuple[float, int]] = {}  # By gateway, with when it was said.
        self._group_id = serve.get_replica_context().replica_id.unique_id
        app = serve.get_replica_context().app_name
        with StartSteps(app, self._group_id) as steps:
            self._server = await GroupServer.start(
                config, group_id=self._group_id, on_step=steps.begin
            )
        self._at_end.push_async_callback(self._server.stop, drain_timeout_s=config.drain_timeout_s)
        _freeze_garbage()

    def record_replica_metadata(self) -> dict[str, str]:
        """Reaches every gateway through Serve's membership."""
        return self._server.contact.metadata()

    def check_health(self) -> None:
        """Serve replaces the group when this raises."""
        self._server.check()

    async def note_demand(self, gateway: str, num_tokens: int) -> None:
        """Hears from a gateway how many prompt tokens wait there for any group.

        Where no group runs, the call waits with Serve, and is what has one started.
        """
        self._demand[gateway] = time.monotonic(), num_tokens

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's controller hears once a second, for `quire.cluster.scaling.serve`."""
        now_s = time.monotonic()
        self._demand = {
            gateway: (time_s, num_tokens)
            for gateway, (time_s, num_tokens) in self._demand.items()
            if now_s - time_s < _DEMAND_KEPT_S
        }
        return report(
            self._server.stats,
            max_num_seqs=self._config.engine.max_num_seqs,
            demand={gateway: num_tokens for gateway, (_, num_tokens) in self._demand.items()},
        )

    async def generate(
        self, token_ids: Sequence[int], params: SamplingParams, *, cache_salt: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        """For other Serve applications, through a handle with ``stream=True``.

        ``params.n`` and ``params.stop`` are the caller's matter, as they are the gateway's.
        """
        request = Prepared(
            request_id=f"handle/{uuid.uuid4()}",
            prompt_token_ids=as_token_ids(token_ids),
            sampling=params,
            cache_salt=cache_salt,
        )
        async with contextlib.aclosing(self._server.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def __del__(self) -> None:
        await self._at_end.aclose()


class Gateway:
    """A Serve replica that is one gateway."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it.
        self, config: ClusterConfig, *groups: DeploymentHandle[ReplicaGroup]
    ) -> None:
        """``groups``: of each of ``config.models``."""
        self._at_end = contextlib.AsyncExitStack()
        log_beside_serve()
        keep_to_node_address()
        self._config = config
        claims = claim_ports(config, owner=_owner)
        self._at_end.callback(claims.close)
        takes_adapters = any(each.engine.enable_lora for each in config.models.values())
        self._server = await GatewayServer.start(
            config,
            make_table=self.make_table,
            ask_others=self._ask_for_adapters if takes_adapters else nobody_knows,
        )
        self._server.models.explanations.ask_others = self._ask_others
        if takes_adapters:
            adapters = self._server.models.adapters
            adapters.tell_others = self._tell_of_adapters
            learning = asyncio.create_task(self._learn_adapters(adapters))
            self._at_end.callback(learning.cancel)
        # Serve refers to request routers weakly: the handles have to be kept.
        self._handles = [
            self._follow(each, handle)
            for each, handle in zip(config.models.values(), groups, strict=True)
        ]
        self._watched = asyncio.create_task(
            be_watched(self._server.listeners, silence_timeout_s=config.silence_timeout_s)
        )
        self._at_end.callback(self._watched.cancel)
        stop = partial(self._server.stop, drain_timeout_s=config.drain_timeout_s)
        drain = partial(self._drain_for_good, stop)
        self._at_end.callback(asyncio.create_task(drain_when_told(drain)).cancel)
        # Ends in reverse order: streams that remain when a gateway stops may need a group that is
        # started only then.
        self._at_end.push_async_callback(stop)
        self._at_end.callback(claims.close)  # First of all: it listens no more.
        _freeze_garbage()

    def check_health(self) -> None:
        """Serve replaces the gateway when this raises."""
        if self._watched.done():
            self._watched.result()
            raise RuntimeError("it did not run for a while, and gets no new connections since")

    def make_table(self, config: ClusterConfig) -> RoutingTable:
        """A model's routing table at this gateway; benchmarks override it to inject faults."""
        return new_table(config)

    def _follow(
        self, config: ClusterConfig, groups: DeploymentHandle[ReplicaGroup]
    ) -> DeploymentHandle[ReplicaGroup]:
        """Hears of a model's groups, until the end."""
        # Deriving a handle makes its request router, which publishes the groups as they come
        # and go.
        handle = groups.options()
        name = config.model_name
        service, pool = self._server.models.named(name), pool_of(name)
        self._at_end.callback(REGISTRY.subscribe(pool, partial(self._take_members, name)))
        self._at_end.callback(REGISTRY.attach(pool, service.table, hash_prompt=service.hash_prompt))
        if config.autoscaling:
            report = _report_demand(service.groups.demand, handle)
            self._at_end.callback(asyncio.create_task(report).cancel)
        return handle

    async def _drain_for_good(self, stop: Callable[[], Awaitable[None]]) -> None:
        for service in self._server.models.by_name.values():
            service.groups.expect_no_more("the cluster stops, and no group is started any more")
        await stop()

    def _take_members(self, model: str, members: Sequence[Member]) -> None:
        # Serve passes on what a replica said of itself, and nothing for one that could not say.
        said = [GroupContact.of(member.metadata or {}) for member in members]
        self._server.set_groups([each for each in said if each is not None], model=model)

    async def recall(self, asker: str, question: bytes, tenant: str | None) -> bytes:
        """This gateway's answer to an `ExplainRoutingRequest` that another gateway got, as an
        `ExplainRoutingResponse`; to its own question it answers nothing."""
        if asker == serve.get_replica_context().replica_id.unique_id:
            return b""
        request = pb.ExplainRoutingRequest.FromString(question)
        answer = await self._server.models.explanations.own(request, tenant=tenant)
        return answer.SerializeToString()

    @cached_property
    def _gateways(self) -> "DeploymentHandle[Gateway]":
        """All, this one among them. Made when it is first needed, and once: Serve keeps it told."""
        context = serve.get_replica_context()
        return serve.get_deployment_handle(context.deployment, app_name=context.app_name)

    async def _ask_others(self, request: pb.ExplainRoutingRequest, tenant: str | None) -> Answers:
        said, silence = await self._broadcast("recall", request.SerializeToString(), tenant)
        return [pb.ExplainRoutingResponse.FromString(each) for each in said], silence

    async def hear_of_adapters(self, asker: str, words: Sequence[Word]) -> list[Word]:
        """Takes in what the gateway ``asker`` says of adapters; returns all that is known here."""
        adapters = self._server.models.adapters
        if asker != serve.get_replica_context().replica_id.unique_id:
            adapters.hear(words)
        return adapters.words()

    async def _tell_of_adapters(self, words: Sequence[Word]) -> str:
        return (await self._broadcast("hear_of_adapters", words))[1]

    async def _ask_for_adapters(self) -> list[Word]:
        """Serve needs a moment to tell a gateway that has just started of the others."""
        for _ in range(_ASKS):
            said, _ = await self._broadcast("hear_of_adapters", ())
            if said:
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        return [word for words in said for word in words]

    async def _learn_adapters(self, adapters: Adapters) -> None:
        """What is said while a gateway starts does not reach it."""
        await asyncio.sleep(_LEARN_AGAIN_S)
        adapters.hear(await self._ask_for_adapters())

    async def _broadcast(self, method: str, *arguments: object) -> tuple[list[Any], str]:
        """Calls ``method`` of all gateways with this one's name; returns the results, and which
        of the others gave none. Bounds its time, and raises nothing."""
        name = serve.get_replica_context().replica_id.unique_id
        try:
            call = self._gateways.broadcast(method, name, *arguments)
            said = await call.results_async(timeout_s=_RECALL_TIMEOUT_S, return_exceptions=True)
        except Exception as error:  # Ray's own, of many kinds.
            _log.info("other gateways cannot be asked: %r", error)
            return [], f"other gateways did not answer within {_RECALL_TIMEOUT_S:g} s"
        answers = [each for each in said if not isinstance(each, BaseException)]
        num_silent = len(said) - len(answers)
        silence = f"{num_silent} of {len(said) - 1} other gateways did not answer"
        return answers, silence if num_silent else ""

    async def addresses(self) -> tuple[str, str]:
        """``host:port`` of the gRPC server and of the HTTP server."""
        return self._server.grpc_address, self._server.http_address

    async def node(self) -> str:
        """The address of this gateway's node."""
        return str(ray.util.get_node_ip_address())

    async def wait_for_groups(self, timeout_s: float = inf) -> list[str]:
        """Returns an empty list once as many groups as each model begins with can be routed to, or
        after ``timeout_s`` the reasons why they cannot be."""
        end_s = time.monotonic() + timeout_s
        for name, config in self._config.models.items():
            groups = self._server.models.named(name).groups
            while groups.num_ready < config.min_groups:
                if time.monotonic() > end_s:
                    known = f"{groups.num_ready} of {config.min_groups} groups of {name} are known"
                    return groups.troubles() or [known]
                await groups.wait_for_change(timeout_s=1)
        return []

    async def __del__(self) -> None:
        await self._at_end.aclose()


def _freeze_garbage() -> None:
    """Spares the garbage collector everything that the process has loaded: a full collection looks
    through 275,000 objects, which held up all streams for 0.1 s or more."""
    gc.collect()
    gc.freeze()


def _owner() -> str:
    """This replica's application, and the Ray cluster where it runs."""
    context = ray.get_runtime_context()
    return f"{serve.get_replica_context().app_name}@{context.gcs_address}"


async def _report_demand(demand: Demand, groups: DeploymentHandle[ReplicaGroup]) -> None:
    """Reports the requests that wait here for a group, as long as there are any."""
    note = groups.options(method_name="note_demand")
    name = serve.get_replica_context().replica_id.unique_id
    was_told = True
    while True:
        await demand.wait_for_some()
        try:
            await _tell(note, name, demand)
            was_told = True
        # Of many kinds, some of them while Serve replaces groups: the next try may do.
        except Exception as error:
            end_if_cancelled()
            if was_told:
                _log.warning("demand cannot be told: %r", error)
            was_told = False
        await asyncio.sleep(_DEMAND_REPORT_S)


async def _tell(note: DeploymentHandle[ReplicaGroup], gateway: str, demand: Demand) -> None:
    call = cast("DeploymentResponse[None]", note.remote(gateway, demand.num_tokens))
    answer = asyncio.ensure_future(_answer(call))
    try:
        # The call may wait for a group; nobody needs one any more when all clients are gone.
        await demand.wait_while_some(until=answer)
    finally:
        if not answer.done():
            # It raises what went wrong with the call, which the answer says as well.
            with contextlib.suppress(Exception):
                call.cancel()
    await asyncio.wait([answer])


async def _answer(call: DeploymentResponse[None]) -> None:
    try:
        await call
    except Exception as error:  # Ray's own, of many kinds: a group died, or the call was cancelled.
        _log.debug("demand was not heard: %r", error)
