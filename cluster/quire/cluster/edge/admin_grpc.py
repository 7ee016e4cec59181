"""The `Admin` service for operators: groups, draining, adapters and usage.

A group drains itself and tells every gateway that it does; this gateway only forwards the request.
"""

import asyncio
from collections.abc import Iterator

import grpc
from google.protobuf.json_format import ParseDict

from quire.cluster.edge.access import Access, allows
from quire.cluster.edge.grpc_errors import Context, refuse, statuses
from quire.cluster.features.adapters.keeper import Adapter
from quire.cluster.gateway.models import Models
from quire.cluster.links.group_client import GroupClient
from quire.cluster.links.groups import Groups
from quire.router.prefix_index.directory import GroupId
from quire.v1 import admin_pb2 as pb
from quire.v1 import admin_pb2_grpc, group_pb2

_LOOK_S = 0.05
_UNDRAIN_TIMEOUT_S = 5.0


class AdminService(admin_pb2_grpc.AdminServicer):
    """The groups of all models of a gateway, over gRPC."""

    def __init__(self, models: Models) -> None:
        self._models = models

    @allows(Access.OPERATOR)
    async def ListGroups(
        self, request: pb.ListGroupsRequest, context: Context
    ) -> pb.ListGroupsResponse:
        return overview_of(self._models)

    @allows(Access.OPERATOR)
    async def Drain(  # type: ignore[override]
        self, request: pb.DrainRequest, context: Context
    ) -> None:
        _, client, epoch = await self._client(request.group, context)
        shown = None
        while shown != 0:
            if client.phase == group_pb2.StepFrame.SERVING:
                if shown is not None:
                    message = f"group {request.group} takes requests again"
                    await refuse(context, grpc.StatusCode.ABORTED, "GROUP_SERVES", message)
                client.drain(is_wanted=True)
            elif client.num_requests != shown:
                shown = client.num_requests
                await context.write(pb.DrainResponse(num_requests=shown))
                continue
            await self._pause(client, epoch, context)

    @allows(Access.OPERATOR)
    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        groups, client, epoch = await self._client(request.group, context)
        client.drain(is_wanted=False)
        try:
            async with asyncio.timeout(_UNDRAIN_TIMEOUT_S):
                while not groups.is_routed_to(client):
                    await self._pause(client, epoch, context)
        except TimeoutError:
            await refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                "GROUP_STOPS",
                f"group {request.group} is about to stop, or another model has taken over",
            )
        return pb.UndrainResponse()

    @allows(Access.OPERATOR)
    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: Context
    ) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(_adapter, self._models.adapters))

    @allows(Access.OPERATOR)
    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context
    ) -> pb.LoadAdapterResponse:
        response = pb.LoadAdapterResponse()
        async with statuses(context, request):
            adapter, incomplete = await self._models.adapters.load(
                request.name, request.source, model=request.model
            )
            response = pb.LoadAdapterResponse(adapter=_adapter(adapter), incomplete=incomplete)
        return response

    @allows(Access.OPERATOR)
    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context
    ) -> pb.UnloadAdapterResponse:
        response = pb.UnloadAdapterResponse()
        async with statuses(context, request):
            response.incomplete = await self._models.adapters.unload(request.name)
        return response

    @allows(Access.OPERATOR)
    async def Usage(self, request: pb.UsageRequest, context: Context) -> pb.UsageResponse:
        answer = await self._models.usage.answer(request.tenant or None)
        response = pb.UsageResponse()
        await asyncio.to_thread(ParseDict, answer, response, ignore_unknown_fields=True)
        return response

    def _known(self) -> Iterator[tuple[Groups, GroupClient]]:
        return _known(self._models)

    async def _client(self, group_id: str, context: Context) -> tuple[Groups, GroupClient, int]:
        """The attached group of this name, the `Groups` that it belongs to, and its epoch."""
        attached = {
            client.description.group_id: (groups, client, client.description.epoch)
            for groups, client in self._known()
            if client.is_attached
        }
        if group_id in attached:
            return attached[group_id]
        known = ", ".join(sorted(attached)) or "none"
        message = f"group={group_id!r} is not attached; attached are: {known}"
        await refuse(context, grpc.StatusCode.NOT_FOUND, "GROUP_NOT_FOUND", message)
        raise AssertionError  # Not reached: `refuse` has raised.

    async def _pause(self, client: GroupClient, epoch: int, context: Context) -> None:
        """Waits a moment. Ends the call if the group is gone or the gateway stops."""
        await asyncio.sleep(_LOOK_S)
        if self._models.is_draining:
            message = "the gateway is stopping"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "GATEWAY_STOPS", message)
        if not client.is_attached or client.description.epoch != epoch:
            message = f"the group at {client.address} is gone: {client.last_error}"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "GROUP_LOST", message)


def overview_of(models: Models) -> pb.ListGroupsResponse:
    """The groups of a gateway, and the gateway's own load."""
    groups = [_message(*known) for known in _known(models)]
    groups.sort(key=lambda group: (group.id, group.address))
    services = models.by_name.values()
    gateway = pb.GatewayLoad(
        num_inflight=models.num_inflight,
        num_queued=sum(each.admission.queued.num_requests for each in services),
    )
    for service in services:
        bounds, counts = service.telemetry.first_tokens()
        former = list(gateway.ttft_counts) or [0] * len(counts)
        gateway.ttft_bounds_s[:] = bounds
        gateway.ttft_counts[:] = map(sum, zip(former, counts, strict=True))
    return pb.ListGroupsResponse(groups=groups, gateway=gateway, num_groups=models.num_groups)


def _known(models: Models) -> Iterator[tuple[Groups, GroupClient]]:
    """Every group, with the `Groups` that it belongs to."""
    for service in models.by_name.values():
        for client in service.groups.clients:
            yield service.groups, client


def _adapter(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(
        name=adapter.name, model=adapter.model, source=adapter.source, digest=adapter.digest
    )


def _message(groups: Groups, client: GroupClient) -> pb.Group:
    if not client.is_attached:
        state, trouble = pb.Group.UNREACHABLE, client.last_error or "connecting"
        return pb.Group(address=client.address, state=state, trouble=trouble)
    card = client.description
    load = groups.loads.get(GroupId(card.group_id))
    message = pb.Group(
        id=card.group_id,
        address=client.address,
        state=_state(groups, client),
        model=card.model,
        tensor_parallel_size=card.tensor_parallel_size,
        num_requests=client.num_requests,
        num_blocks=card.num_blocks,
    )
    if load is not None:
        for name in _LOAD:
            setattr(message, name, getattr(load, name))
    return message


def _state(groups: Groups, client: GroupClient) -> pb.Group.State:
    if groups.is_routed_to(client):
        return pb.Group.SERVING
    is_draining = client.phase == group_pb2.StepFrame.DRAINING
    return pb.Group.DRAINING if is_draining else pb.Group.STOPPING


_LOAD = [
    field.name
    for field in group_pb2.Load.DESCRIPTOR.fields
    if field.name in pb.Group.DESCRIPTOR.fields_by_name
]
