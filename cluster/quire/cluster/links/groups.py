"""The replica groups of one model that a gateway is attached to, and the routing state of each.

A group is routed to from its first frame until its stream breaks or it reports that it drains, and
again when it reports that it serves.
A group that has left the membership gets no new requests but keeps its requests until they end.

All routed groups have the same model card. Groups with another card are refused while any group is
routed to, and take over once all of those drain. A stream that has tokens never continues on a
group with another card.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from quire.cluster.errors import Death, GroupLost, GroupMismatch
from quire.cluster.features.adapters.groups import Holders
from quire.cluster.features.autoscale.demand import Demand
from quire.cluster.features.kv_exchange.exchange import Exchange
from quire.cluster.features.kv_exchange.gateway_warming import MAX_SOURCES, Warming
from quire.cluster.links.deaths import Deaths
from quire.cluster.links.group_client import GroupClient, GroupClientConfig
from quire.cluster.links.group_link import Connect, GroupContact, grpc_connect
from quire.cluster.links.group_stream import GroupStream, Turns
from quire.cluster.model_card import Expectation
from quire.cluster.supervise import keep_going
from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import Applied, GroupId, Position
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.events import EventBatch
from quire.worker.request.model_card import ModelCard

_log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 1.0
_NOTICED_IN = 1.5
"""Time until a death is noticed, as a multiple of the silence timeout. Groups that die at the same
moment are noticed within little more than one timeout: by broken connections or by silence."""


class Groups:
    """Keeps one client for each address, and updates ``table`` with what they report.

    It is made and used inside one event loop. ``card`` is None until the first group is attached.
    """

    def __init__(
        self,
        *,
        table: RoutingTable,
        expected: Expectation,
        config: GroupClientConfig | None = None,
        connect: Connect = grpc_connect,
        jitter: Callable[[float, float], float] = random.uniform,
        contacts: Mapping[str, GroupContact] | None = None,
        adapter_folder: Callable[[str], Path | None] = lambda digest: None,
    ) -> None:
        """``contacts``: each group's token and certificate by address, for other groups; it may
        change. ``adapter_folder`` returns this node's folder of an adapter, by digest."""
        self.card: ModelCard | None = None
        self.task = ""
        """The model's task, as its groups report it; empty until the first one is attached."""
        self.demand = Demand()
        """The requests that wait for any group."""
        self.deaths = Deaths(
            window_s=_NOTICED_IN * (config or GroupClientConfig()).silence_timeout_s,
            clock=asyncio.get_running_loop().time,
        )
        self._table = table
        self._expected = expected
        self._config = config or GroupClientConfig()
        self._connect = connect
        self._jitter = jitter
        self._turns = Turns()
        self._clients: dict[str, tuple[GroupClient, asyncio.Task[None]]] = {}  # By address.
        self._leaving: list[tuple[GroupClient, asyncio.Task[None]]] = []
        self._attached: dict[GroupId, GroupClient] = {}
        self.holders = Holders(self._attached.values, adapter_folder)
        """The attached groups that hold each LoRA adapter."""
        self._retired: set[GroupClient] = set()
        self._is_draining = False
        self._loads: dict[GroupId, pb.Load] = {}
        self._exchange = Exchange(self._attached, self._loads, {} if contacts is None else contacts)
        self._warming = Warming(self._update_members)
        self._changed = asyncio.Event()
        self._watchers: list[Callable[[], None]] = []
        self._load_watchers: list[Callable[[], None]] = []
        self._no_more = ""
        self._is_closed = False
        self._housekeeper = asyncio.create_task(
            keep_going(self._keep_house, name="housekeeping", pause_s=_HOUSEKEEPING_S)
        )

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Replaces the addresses, ``host:port``, of the running groups. Does nothing once
        closed."""
        if self._is_closed:
            return
        wanted = set(addresses)
        for address in sorted(self._clients.keys() - wanted):
            client, task = self._clients.pop(address)
            self._leaving.append((client, task))
            self._retire(client)
        for address in sorted(wanted - self._clients.keys()):
            client = GroupClient(
                address,
                self,
                config=self._config,
                connect=self._connect,
                jitter=self._jitter,
                turns=self._turns,
            )
            client.is_draining = self._is_draining
            self._clients[address] = (
                client,
                asyncio.create_task(
                    keep_going(client.run, name=f"the client of the group at {address}")
                ),
            )

    def begin_drain(self) -> None:
        """Tells the groups that this gateway drains, so that others can use its share of them."""
        self._is_draining = True
        for client, _ in self._clients.values():
            client.is_draining = True

    def expect_no_more(self, reason: str) -> None:
        """Notes that no group will be started any more: requests that wait for one fail with
        ``reason``."""
        self._no_more = reason
        self._update_members()

    @property
    def may_come(self) -> bool:
        """Whether it makes sense to wait for a group: there is one, or one may be started."""
        return bool(self._routable()) or not self._no_more

    @property
    def num_ready(self) -> int:
        """Number of groups that requests can be routed to."""
        return len(self._routable())

    @property
    def clients(self) -> list[GroupClient]:
        """The clients of all known groups, including groups that are not attached or have left."""
        return [client for client, _ in (*self._clients.values(), *self._leaving)]

    def is_routed_to(self, client: GroupClient) -> bool:
        """Whether new requests may be routed to the client's group."""
        return client in self._attached.values() and client not in self._retired

    @property
    def loads(self) -> Mapping[GroupId, pb.Load]:
        """The last load of each attached group."""
        return self._loads

    @property
    def num_unsent_commands(self) -> int:
        """Number of commands for attached groups that were not written to their streams yet."""
        return sum(client.num_unsent_commands for client in self._attached.values())

    def troubles(self) -> list[str]:
        """Why groups take no requests, one line for each such group."""
        return [self._no_more] * bool(self._no_more) + [
            f"{address}: {'draining' if client.is_attached else client.last_error or 'connecting'}"
            for address, (client, _) in self._clients.items()
            if not self.is_routed_to(client)
        ]

    def submit(
        self,
        group_id: GroupId,
        submit: pb.Submit,
        *,
        on_cleared: Callable[[], None] | None = None,
    ) -> GroupStream:
        """Submits as `GroupClient.submit` does. Raises GroupLost: the group is not attached."""
        client = self._attached.get(group_id)
        if client is None:
            raise GroupLost(f"group {group_id} is not attached")
        return client.submit(submit, on_cleared=on_cleared)

    def source(self, source: GroupId, *, taker: GroupId, num_blocks: int) -> pb.BlockSource | None:
        """How ``taker`` reaches ``source``, as `Exchange.source` tells."""
        return self._exchange.source(source, taker=taker, num_blocks=num_blocks)

    def lacking(self, adapter: str) -> frozenset[GroupId]:
        """The groups that take requests but are not known to hold ``adapter``; none if ``adapter``
        is empty. They are asked to hold it."""
        if not adapter:
            return frozenset()
        clients = [self._attached[group_id] for group_id in self._routable()]
        lacking = [client for client in clients if adapter not in client.adapters]
        self.holders.ask(lacking, adapter)
        return frozenset(GroupId(each.description.group_id) for each in lacking)

    async def hold(self, adapter: str, *, timeout_s: float) -> None:
        """Returns once a group that takes requests holds ``adapter``. Raises as
        `Holders.wait_for_one`."""
        clients = [self._attached[group_id] for group_id in self._routable()]
        await self.holders.wait_for_one(clients, adapter, timeout_s=timeout_s)

    async def hold_everywhere(self, adapter: str, *, timeout_s: float) -> None:
        """Makes all groups that take requests hold ``adapter``. Groups that cannot be given it in
        time get it when it is needed.

        Raises:
            InvalidRequest: The model cannot run the adapter.
        """
        clients = [self._attached[group_id] for group_id in self._routable()]
        await self.holders.wait_for_all(clients, adapter, timeout_s=timeout_s)

    def forget_adapter(self, group_id: GroupId, adapter: str) -> None:
        """Notes that the group has reported that it no longer holds ``adapter``."""
        if group_id in self._attached:
            self._attached[group_id].adapters.discard(adapter)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Calls ``on_change`` whenever a group becomes ready or stops being ready."""
        self._watchers.append(on_change)

    def watch_loads(self, on_load: Callable[[], None]) -> None:
        """Calls ``on_load`` after every load that a group reports, once the table has it."""
        self._load_watchers.append(on_load)

    async def wait_for_change(self, *, timeout_s: float) -> bool:
        """Returns true once a group became ready or stopped being ready, false after
        ``timeout_s``."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Detaches from every group; requests in progress are lost."""
        self._is_closed = True
        tasks = [self._housekeeper]
        tasks += [task for _, task in (*self._clients.values(), *self._leaving)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.holders.close()
        await self._warming.close()

    # `GroupListener`, called by the clients.

    def check(self, description: pb.GroupDescription) -> None:
        self._expected.check(description)
        if self.card is not None and self._routable():
            Expectation.of(self.card).check(description)

    def attached(self, client: GroupClient) -> None:
        if any(client is leaving for leaving, _ in self._leaving):
            return  # A new group at the address of one that left; another client may attach to it.
        self._take_card(client)  # Again, because others may have been attached since `check`.
        group_id = GroupId(client.description.group_id)
        # A group that came back before its old stream was missed starts without old state.
        self._attached.pop(group_id, None)
        self._update_members()
        self._attached[group_id] = client
        sources = self._exchange.fullest(group_id, limit=MAX_SOURCES)
        self._warming.begin(client, sources)
        self._update_members()
        _log.info("group %s at %s is attached", group_id, client.address)

    def detached(self, client: GroupClient) -> None:
        self._retired.discard(client)
        self._warming.forget(client)
        group_id = GroupId(client.description.group_id)
        if self._attached.get(group_id) is client:
            del self._attached[group_id]
            self._loads.pop(group_id, None)
            self._update_members()

    def died(self, death: Death) -> None:
        self.deaths.add(death)

    def turned_away(self, client: GroupClient) -> None:
        self._retire(client)

    def taken_back(self, client: GroupClient) -> bool:
        if any(client is leaving for leaving, _ in self._leaving):
            return False
        try:
            self._take_card(client)
        except GroupMismatch:
            return False
        self._retired.discard(client)
        self._update_members()
        _log.info("group %s takes requests again", client.description.group_id)
        return True

    def has_other(self, client: GroupClient) -> bool:
        if self.card != ModelCard.of(client.description):
            return False
        return any(self._attached[group_id] is not client for group_id in self._routable())

    def load(
        self, client: GroupClient, load: pb.Load, *, step: int, num_submits: int | None
    ) -> None:
        description = client.description
        group_id = GroupId(description.group_id)
        if self._attached.get(group_id) is not client:
            return
        self._loads[group_id] = load
        self._table.update_load(
            group_id,
            GroupLoad(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_pending_prefill_tokens=load.num_pending_prefill_tokens,
                num_available_blocks=load.num_free_blocks + load.num_cached_blocks,
                num_prompt_tokens=load.num_prompt_tokens,
                num_hit_tokens=load.num_hit_tokens,
                num_output_tokens=load.num_output_tokens,
                num_host_tokens=load.num_host_tokens,
                num_disk_tokens=load.num_disk_tokens,
                disk_s=load.disk_s,
                num_peer_tokens=load.num_peer_tokens,
                peer_s=load.peer_s,
                num_failed_pulls=load.num_failed_pulls,
                max_num_seqs=description.max_num_seqs or None,
                num_gateways=load.num_gateways,
                num_shown=num_submits,
                num_steps=step,
                adapters=frozenset(load.adapters),
                num_adapters=load.num_adapters,
                max_adapters=load.max_adapters,
            ),
            is_awaited=self.demand.num_requests > 0,
        )
        for on_load in self._load_watchers:
            on_load()

    def events(self, client: GroupClient, batch: EventBatch) -> bool:
        group_id = GroupId(client.description.group_id)
        if self._attached.get(group_id) is not client:
            return True  # From a former group of that name, which still finishes its requests.
        return isinstance(self._table.apply_events(group_id, batch), Applied)

    def events_position(self, client: GroupClient) -> Position:
        return self._table.events_position(GroupId(client.description.group_id))

    def _take_card(self, client: GroupClient) -> None:
        """Adopts the card of the client's group if no other is routed to. Raises GroupMismatch: the
        card differs from that of the routed groups."""
        self.check(client.description)
        if not self._routable():
            card = ModelCard.of(client.description)
            if self.card not in (None, card):
                _log.warning("the groups of another kind take over: %s is now %s", self.card, card)
            self.card = card
            self.task = client.description.task

    def _routable(self) -> list[GroupId]:
        serving = [
            (group_id, client)
            for group_id, client in self._attached.items()
            if client not in self._retired
        ]
        warm = [group_id for group_id, client in serving if client not in self._warming]
        return warm or [group_id for group_id, _ in serving]

    def _retire(self, client: GroupClient) -> None:
        if client.is_attached and client not in self._retired:
            self._retired.add(client)
            self._update_members()

    def _update_members(self) -> None:
        self._table.update_members(self._routable(), lenders=self._exchange.members())
        self._changed.set()
        self._changed = asyncio.Event()
        for on_change in self._watchers:
            on_change()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            self._table.expire()
            for leaving in [entry for entry in self._leaving if not entry[0].num_streams]:
                leaving[1].cancel()
                await asyncio.wait([leaving[1]])
                self._leaving.remove(leaving)
