"""Tracks which groups of a model hold which LoRA adapters, and gives adapters to the others.

A group that is not known to hold an adapter gets no request for it. It is first asked to hold it;
if its node lacks the files, they are sent from this gateway's node or another group's. Meanwhile
requests go to groups that hold the adapter, or wait if there is none.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from math import inf
from pathlib import Path

import grpc.aio

from quire.cluster.errors import GroupLost, Unavailable
from quire.cluster.features.adapters.files import pieces_of
from quire.cluster.links.group_client import GroupClient
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import InvalidRequest, QuireError

_HOLD_TIMEOUT_S = 60.0
_WRITE_TIMEOUT_S = 600.0
_FAILED_FOR_S = 5.0
"""Time until a group that could not be given an adapter is asked again."""
_MAX_WRITES = 2
"""Most adapters that are sent at a time."""


class Holders:
    """The holders of adapters among a model's groups. Belongs to one event loop."""

    def __init__(
        self,
        clients: Callable[[], Iterable[GroupClient]],
        folder: Callable[[str], Path | None],
    ) -> None:
        """``clients`` returns the clients of the attached groups. ``folder`` returns this node's
        folder of an adapter, by digest; ``None`` if there is none."""
        self._clients = clients
        self._folder = folder
        self._asking: dict[tuple[GroupClient, str], asyncio.Task[None]] = {}
        self._writes = asyncio.Semaphore(_MAX_WRITES)

    def ask(self, clients: Iterable[GroupClient], digest: str) -> list["asyncio.Task[None]"]:
        """Asks the clients' groups to hold the adapter, and returns a task for each. A group that
        failed within `_FAILED_FOR_S` is not asked again; its failed task is returned."""
        tasks = []
        for client in clients:
            key = (client, digest)
            if key not in self._asking:
                task = self._asking[key] = asyncio.create_task(self._hold(client, digest))
                task.add_done_callback(partial(self._asked, key))
            tasks.append(self._asking[key])
        return tasks

    async def wait_for_one(
        self, clients: Iterable[GroupClient], digest: str, *, timeout_s: float = inf
    ) -> None:
        """Returns once one of the clients' groups holds the adapter.

        Raises:
            InvalidRequest: The model cannot run the adapter.
            Unavailable: No node has its files.
            GroupLost: No group could be given it in time.
        """
        left: set[asyncio.Task[None]] = set(self.ask(clients, digest))
        error: QuireError = GroupLost(f"no group holds the adapter {digest} yet")
        end_s = asyncio.get_running_loop().time() + timeout_s
        while left:
            rest_s = None if end_s == inf else end_s - asyncio.get_running_loop().time()
            done, left = await asyncio.wait(
                left, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            errors = [task.exception() for task in done if not task.cancelled()]
            if None in errors:
                return
            error = next((each for each in errors if isinstance(each, QuireError)), error)
            if isinstance(error, InvalidRequest):
                break
        raise error

    async def wait_for_all(
        self, clients: Iterable[GroupClient], digest: str, *, timeout_s: float
    ) -> None:
        """Returns once each of the clients' groups holds the adapter or could not be given it, or
        after ``timeout_s``. Raises InvalidRequest: the model cannot run the adapter."""
        tasks = self.ask(clients, digest)
        if not tasks:
            return
        done, _ = await asyncio.wait(tasks, timeout=timeout_s)
        for task in done:
            if not task.cancelled() and isinstance(error := task.exception(), InvalidRequest):
                raise error

    async def close(self) -> None:
        for task in (tasks := list(self._asking.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _asked(self, key: tuple[GroupClient, str], task: "asyncio.Task[None]") -> None:
        def forget() -> None:
            self._asking.pop(key, None)

        if task.cancelled() or task.exception() is None:
            forget()
        else:
            asyncio.get_running_loop().call_later(_FAILED_FOR_S, forget)

    async def _hold(self, client: GroupClient, digest: str) -> None:
        try:
            answer = await self._held(client, digest)
            if not (answer.is_held or answer.refusal):
                async with self._writes:
                    pieces = self._pieces(digest)
                    await client.link.WriteAdapter(pieces, timeout=_WRITE_TIMEOUT_S)
                answer = await self._held(client, digest)
        except grpc.aio.AioRpcError as error:
            raise GroupLost(
                f"the group at {client.address} could not be given the adapter {digest}: "
                f"{error.code().name}: {error.details()}"
            ) from None
        if answer.refusal:
            raise InvalidRequest(answer.refusal, param="model")
        if not answer.is_held:
            raise GroupLost(f"the group at {client.address} does not keep the adapter {digest}")
        client.adapters.add(digest)

    async def _held(self, client: GroupClient, digest: str) -> pb.HoldAdapterResponse:
        request = pb.HoldAdapterRequest(digest=digest)
        return await client.link.HoldAdapter(request, timeout=_HOLD_TIMEOUT_S)

    def _pieces(self, digest: str) -> AsyncIterator[pb.AdapterPiece]:
        folder = self._folder(digest)
        if folder is not None:
            return pieces_of(folder, digest)
        for other in self._clients():
            if digest in other.adapters:
                call = other.link.ReadAdapter(pb.ReadAdapterRequest(digest=digest))
                return aiter(call)
        raise Unavailable(
            f"the files of the adapter {digest} are neither on this gateway's node nor on any "
            "group's: load it again"
        )
