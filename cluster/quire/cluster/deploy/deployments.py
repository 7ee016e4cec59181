"""The Ray Serve deployments of a Quire application: its gateways, and each model's groups.

Serve starts, replaces and counts them, and tells each gateway which groups run. Requests and tokens
do not pass through Serve: groups and gateways have their own servers.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from quire.cluster.config import ClusterConfig, GroupConfig, SharedSettings
from quire.cluster.deploy.gateway_calls import ModelState
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.deploy.line import drain_when_told
from quire.cluster.deploy.listed import Listed, from_json
from quire.cluster.deploy.logs import log_beside_serve
from quire.cluster.deploy.model_set import ModelSet
from quire.cluster.deploy.names import application_of
from quire.cluster.deploy.port_claims import claim_ports
from quire.cluster.deploy.serve_port import keep_to_node_address
from quire.cluster.deploy.served_model import ServedModel, new_table
from quire.cluster.deploy.start import given_up
from quire.cluster.deploy.start_steps import StartSteps
from quire.cluster.edge.admin_grpc import overview_of
from quire.cluster.edge.models_api import state_of
from quire.cluster.features.adapters.catalog import Adapters, Word
from quire.cluster.features.autoscale.gateways import INFLIGHT
from quire.cluster.features.autoscale.report_demand import report_demand
from quire.cluster.features.autoscale.serve import report
from quire.cluster.features.explain.explanations import Answers
from quire.cluster.features.watcher.watched import be_watched
from quire.cluster.garbage import collect_seldom
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact
from quire.cluster.supervise import end_if_cancelled
from quire.router.registry import REGISTRY, Member
from quire.router.table import RoutingTable
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams


def pool_of(part: str) -> str:
    """The name under which Serve's request router publishes a model's groups in this process."""
    return f"replica_groups/{part}"


_log = logging.getLogger(__name__)

_LOOK_S = 2.0
_DEMAND_KEPT_S = 2.0
_RECALL_TIMEOUT_S = 3.0
"""Timeout of calls to all other gateways."""
_ASKS = 3
_ASK_AGAIN_S = 0.5
_LEARN_AGAIN_S = 5.0


class ReplicaGroup:
    """A Serve replica that runs one replica group."""

    async def __init__(self, config: GroupConfig) -> None:  # type: ignore[misc]
        self._at_end = contextlib.AsyncExitStack()  # First: `__del__` follows a failed start too.
        log_beside_serve(config)
        keep_to_node_address()
        if config.group_host == "auto":
            config = replace(config, group_host=ray.util.get_node_ip_address())
        self._config = config
        self._demand: dict[str, tuple[float, int]] = {}  # Time and tokens, by gateway.
        self._group_id = serve.get_replica_context().replica_id.unique_id
        app = serve.get_replica_context().app_name
        with StartSteps(app, self._group_id) as steps:
            self._server = await GroupServer.start(
                config, group_id=self._group_id, on_step=steps.begin
            )
        self._at_end.push_async_callback(self._server.stop, drain_timeout_s=config.drain_timeout_s)
        collect_seldom()

    def record_replica_metadata(self) -> dict[str, str]:
        """The group's contact, which Serve's membership passes to every gateway."""
        return self._server.contact.metadata()

    def check_health(self) -> None:
        """Called by Serve, which replaces the group when this raises."""
        self._server.check()

    async def note_demand(self, gateway: str, num_tokens: int) -> None:
        """Receives the number of prompt tokens that wait at a gateway for any group.

        If no group runs, the call waits in Serve, which makes Serve start one.
        """
        self._demand[gateway] = time.monotonic(), num_tokens

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The group's metrics, which Serve reads once a second for `features.autoscale.serve`."""
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
        """Generates for other Serve applications, through a handle with ``stream=True``.

        The caller must apply ``params.n`` and ``params.stop`` itself, as gateways do.
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
    """A Serve replica that runs one gateway."""

    async def __init__(self, config: SharedSettings) -> None:  # type: ignore[misc]
        """Serve awaits this, and then `reconfigure`. It keeps the groups' settings too, for
        `quire.cluster.deploy.change`, which asks it for them."""
        self._at_end = contextlib.AsyncExitStack()
        log_beside_serve(config)
        if not config.access_log:
            logging.getLogger("quire.access").setLevel(logging.WARNING)
        keep_to_node_address()
        self._config = config
        claims = claim_ports(config, owner=_owner)
        self._at_end.callback(claims.close)
        self._claims = claims
        self._server = GatewayServer(config)
        self._set = ModelSet(
            config, self._server.models, make_table=self.make_table, follow=self._follow
        )
        self._at_end.push_async_callback(self._set.close)
        self._handles: dict[ServedModel, DeploymentHandle[Any]] = {}
        self._told: dict[str, Any] = {}
        self._gateways: DeploymentHandle[Any] | None = None
        """A handle to all gateways, including this one."""
        self._watched: asyncio.Task[None] | None = None

    async def reconfigure(self, told: dict[str, Any]) -> None:
        """Serves the models in ``told``, a `quire.cluster.deploy.listed.to_json`, from now on. The
        first call opens the ports for clients."""
        self._told = told
        listed, models = from_json(told), self._server.models
        takes_adapters = any(each.settings.engine.enable_lora for each in listed)
        if self._gateways is None:
            # Made now, because it could not be made after Ray has died.
            context = serve.get_replica_context()
            self._gateways = _handle(context.deployment, context.app_name).options()
            if takes_adapters:
                models.adapters.hear(await self._ask_for_adapters())
        await self._set.set(listed)
        if self._watched is not None:
            return
        self._set.check()
        try:
            await self._server.listen()
        except BaseException:
            await models.close()
            raise
        models.explanations.ask_others = self._ask_others
        models.usage.ask_others = self._ask_for_usage
        models.adapters.tell_others = self._tell_of_adapters
        if takes_adapters:
            learning = asyncio.create_task(self._learn_adapters(models.adapters))
            self._at_end.callback(learning.cancel)
        self._watched = asyncio.create_task(
            be_watched(self._server.listeners, silence_timeout_s=self._config.silence_timeout_s)
        )
        self._at_end.callback(self._watched.cancel)
        stop = partial(self._server.stop, drain_timeout_s=self._config.drain_timeout_s)
        drain = partial(self._drain_for_good, stop)
        self._at_end.callback(asyncio.create_task(drain_when_told(drain)).cancel)
        # These end in reverse order: streams that remain when a gateway stops may need a group
        # that starts only then.
        self._at_end.push_async_callback(stop)
        self._at_end.callback(asyncio.create_task(self._look_after_parts()).cancel)
        self._at_end.callback(self._claims.close)  # Runs first of all.
        collect_seldom()

    def check_health(self) -> None:
        """Called by Serve, which replaces the gateway when this raises."""
        if self._watched is not None and self._watched.done():
            self._watched.result()
            raise RuntimeError("it did not run for a while, and gets no new connections since")

    def make_table(self, config: ClusterConfig) -> RoutingTable:
        """A model's routing table at this gateway; benchmarks override it to inject faults."""
        return new_table(config)

    def _follow(self, listed: Listed, served: ServedModel) -> Callable[[], None]:
        """Follows a model's groups, whose application may start later; returns how to stop."""
        app = application_of(serve.get_replica_context().app_name, listed.part)
        # Deriving a handle makes its request router, which publishes changes of the groups. Serve
        # refers to request routers weakly, so the handles must be kept.
        handle = self._handles[served] = _handle(ReplicaGroup.__name__, app).options()
        service, pool = served.service, pool_of(listed.part)
        at_end = contextlib.ExitStack()
        at_end.callback(self._handles.pop, served)
        at_end.callback(REGISTRY.subscribe(pool, partial(_take_members, served)))
        at_end.callback(REGISTRY.attach(pool, service.table, hash_prompt=service.hash_prompt))
        if listed.settings.autoscaling:
            report = report_demand(service.groups.demand, handle)
            at_end.callback(asyncio.create_task(report).cancel)
        return at_end.close

    async def _look_after_parts(self) -> None:
        """Marks models whose groups Serve has given up starting as failed, while that is so."""
        name = serve.get_replica_context().app_name
        models = self._server.models
        while True:
            await asyncio.sleep(_LOOK_S)
            waiting = [each for each in self._set.followed if not each[1].service.can_serve]
            if models.is_draining or not (waiting or models.troubles):
                continue
            try:
                found = await asyncio.to_thread(given_up, name)
            except Exception as error:  # Ray raises many kinds; the next call may succeed.
                end_if_cancelled()
                _log.debug("Serve does not tell of the groups: %r", error)
                continue
            for listed, served in self._set.followed:
                trouble = "" if served.service.can_serve else found.get(listed.part, "")
                if trouble != models.troubles.get(listed.name, ""):
                    models.troubles.pop(listed.name, None)
                    if trouble:
                        models.troubles[listed.name] = trouble
                    served.service.groups.expect_no_more(trouble)

    async def _drain_for_good(self, stop: Callable[[], Awaitable[None]]) -> None:
        for service in self._server.models.by_name.values():
            service.groups.expect_no_more("the cluster stops, and no group is started any more")
        await stop()

    async def recall(self, asker: str, question: bytes, tenant: str | None) -> bytes:
        """This gateway's answer to an `ExplainRoutingRequest` that another gateway got, as an
        `ExplainRoutingResponse`; empty if ``asker`` is this gateway."""
        if asker == serve.get_replica_context().replica_id.unique_id:
            return b""
        request = pb.ExplainRoutingRequest.FromString(question)
        answer = await self._server.models.explanations.own(request, tenant=tenant)
        return answer.SerializeToString()

    async def _ask_others(self, request: pb.ExplainRoutingRequest, tenant: str | None) -> Answers:
        said, silence = await self._broadcast("recall", request.SerializeToString(), tenant)
        return [pb.ExplainRoutingResponse.FromString(each) for each in said], silence

    async def recall_usage(self, asker: str, tenant: str | None) -> dict[str, Any] | None:
        """The usage of the tenant, or of all, that this gateway has counted; ``None`` if ``asker``
        is this gateway."""
        if asker == serve.get_replica_context().replica_id.unique_id:
            return None
        return await self._server.models.usage.own(tenant)

    async def _ask_for_usage(self, tenant: str | None) -> tuple[list[dict[str, Any]], str]:
        said, silence = await self._broadcast("recall_usage", tenant)
        return [each for each in said if each is not None], silence

    async def hear_of_adapters(self, asker: str, words: Sequence[Word]) -> list[Word]:
        """Takes in the ``words`` of the gateway ``asker``; returns all words of this gateway."""
        adapters = self._server.models.adapters
        if asker != serve.get_replica_context().replica_id.unique_id:
            adapters.hear(words)
        return adapters.words()

    async def _tell_of_adapters(self, words: Sequence[Word]) -> str:
        return (await self._broadcast("hear_of_adapters", words))[1]

    async def _ask_for_adapters(self) -> list[Word]:
        """The words of all gateways. Retries, because a new gateway learns of others with delay."""
        for _ in range(_ASKS):
            said, _ = await self._broadcast("hear_of_adapters", ())
            if said:
                break
            await asyncio.sleep(_ASK_AGAIN_S)
        return [word for words in said for word in words]

    async def _learn_adapters(self, adapters: Adapters) -> None:
        """Asks again after the start, during which broadcasts do not reach this gateway."""
        await asyncio.sleep(_LEARN_AGAIN_S)
        adapters.hear(await self._ask_for_adapters())

    async def _broadcast(self, method: str, *arguments: object) -> tuple[list[Any], str]:
        """Calls ``method`` of all gateways with this one's name; returns the results, and how many
        of the others did not answer, as text. Limits its time, and raises nothing."""
        name = serve.get_replica_context().replica_id.unique_id
        assert self._gateways is not None, "`reconfigure` comes first"
        try:
            call = self._gateways.broadcast(method, name, *arguments)
            said = await call.results_async(timeout_s=_RECALL_TIMEOUT_S, return_exceptions=True)
        except Exception as error:  # Ray raises many kinds.
            _log.info("other gateways cannot be asked: %r", error)
            return [], f"other gateways did not answer within {_RECALL_TIMEOUT_S:g} s"
        answers = [each for each in said if not isinstance(each, BaseException)]
        num_silent = len(said) - len(answers)
        silence = f"{num_silent} of {len(said) - 1} other gateways did not answer"
        return answers, silence if num_silent else ""

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The metric that Serve reads once a second for `features.autoscale.gateways`."""
        return {INFLIGHT: float(self._server.models.num_inflight)}

    async def addresses(self) -> tuple[str, str]:
        """``host:port`` of the gRPC server and of the HTTP server. If they listen on all addresses,
        the host is the node's address."""
        grpc, http = self._server.grpc_address, self._server.http_address
        if (host := self._config.host) in ("0.0.0.0", "::"):
            node = await self.node()
            grpc, http = (each.replace(host, node, 1) for each in (grpc, http))
        return grpc, http

    async def node(self) -> str:
        """The address of this gateway's node."""
        return str(ray.util.get_node_ip_address())

    async def settings(self) -> tuple[SharedSettings, dict[str, Any]]:
        """The settings that this gateway was started with, and its current list of models."""
        return self._config, self._told

    async def list_groups(self) -> bytes:
        """The groups and this gateway's load, as a `ListGroupsResponse`."""
        return overview_of(self._server.models).SerializeToString()

    async def models(self) -> list[ModelState]:
        """All listed models, as this gateway sees them."""
        unsettled, models = self._set.unsettled(), self._server.models
        found = []
        for each in from_json(self._told):
            service = models.by_name.get(each.name)
            trouble = models.troubles.get(each.name, "")
            found.append(
                ModelState(
                    name=each.name,
                    aliases=each.settings.aliases,
                    path=str(each.settings.engine.model),
                    num_groups=service.groups.num_ready if service else 0,
                    state=state_of(service, trouble),
                    reason=trouble,
                    unsettled=unsettled.get(each.name, ""),
                )
            )
        return found

    async def adapters(self) -> list[str]:
        """The names of the loaded adapters, also of models that are not served now."""
        return [each.name for each in self._server.models.adapters.words() if each.digest]

    async def wait_for_groups(self, names: Sequence[str], timeout_s: float = inf) -> list[str]:
        """Waits until each of these models has ``min_groups`` groups that can be routed to; returns
        an empty list then, or after ``timeout_s`` the reasons why it has not."""
        end_s = time.monotonic() + timeout_s
        for listed, served in self._set.followed:
            groups, least = served.service.groups, listed.settings.min_groups
            while listed.name in names and groups.num_ready < least:
                if time.monotonic() > end_s:
                    known = f"{groups.num_ready} of {least} groups of {listed.name} are known"
                    return groups.troubles() or [known]
                await groups.wait_for_change(timeout_s=1)
        return []

    async def __del__(self) -> None:
        await self._at_end.aclose()


def _handle(deployment: str, app: str) -> "DeploymentHandle[Any]":
    """A handle. `serve.get_deployment_handle` would require that the application exists."""
    return DeploymentHandle(deployment, app)


def _take_members(served: ServedModel, members: Sequence[Member]) -> None:
    # Serve passes on the metadata of each replica; a replica that could not report any has none.
    said = [GroupContact.of(member.metadata or {}) for member in members]
    served.set_groups([each for each in said if each is not None])


def _owner() -> str:
    """This replica's application and Ray cluster, as ``APPLICATION@CLUSTER``."""
    context = ray.get_runtime_context()
    return f"{serve.get_replica_context().app_name}@{context.gcs_address}"
