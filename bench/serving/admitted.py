"""The gateway's admission in the simulator: the code that the cluster runs, on the virtual clock.

It refuses nothing here, for what was refused is not in the trace.
"""

from collections.abc import Callable
from math import inf

from bench.serving.case import Case

from quire.cluster.admission.admission import Admission
from quire.cluster.admission.capacity import Capacity
from quire.cluster.admission.config import AdmissionConfig
from quire.cluster.admission.ticket import Stage, Ticket
from quire.router.simulate.clock import Clock
from quire.router.simulate.gate import Gate
from quire.router.simulate.group import Group
from quire.router.simulate.trace import Trace
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb

_UNBOUNDED = 10**9


class AdmissionGate:
    """See `quire.router.simulate.gate.Gate`."""

    def __init__(self, trace: Trace, clock: Clock, table: RoutingTable, *, case: Case) -> None:
        self._trace, self._clock, self._table, self._case = trace, clock, table, case
        self._capacity = Capacity()
        config = AdmissionConfig(
            max_queue_wait_s=inf,
            standing_wait_s=inf,
            max_queued_requests=_UNBOUNDED,
            max_queued_tokens=_UNBOUNDED,
        )
        self._admission = Admission(config, self._capacity)
        self._tickets: dict[int, Ticket] = {}
        self._ids: dict[Ticket, int] = {}

    def offer(self, request_id: int) -> bool:
        trace = self._trace
        ticket = Ticket(
            num_prompt_tokens=trace.num_input[request_id], max_tokens=trace.num_output[request_id]
        )
        self._tickets[request_id] = ticket
        self._ids[ticket] = request_id
        now_s = self._clock.now_ms / 1000
        self._admission.offer(ticket, self._table.states(), now_s=now_s)
        return ticket.stage is Stage.RELEASED

    def routed(self, request_id: int) -> None:
        ticket = self._tickets[request_id]
        self._capacity.asked(ticket.max_tokens)
        self._admission.routed(ticket)

    def frame(self, index: int, group: Group) -> None:
        description = pb.GroupDescription(
            group_id=f"group-{index:05}",
            epoch=1,
            max_num_seqs=self._case.max_num_seqs,
            block_size=self._trace.block_size,
        )
        load = pb.Load(
            num_running=group.num_running,
            num_waiting=group.num_waiting,
            num_pending_prefill_tokens=group.num_pending,
            num_prompt_tokens=group.num_prompt_tokens,
            num_hit_tokens=group.num_hit_tokens,
            num_output_tokens=group.num_output_tokens,
            num_gateways=self._case.num_gateways,
        )
        self._capacity.observe(description, load, now_s=self._clock.now_ms / 1000)

    def release(self) -> list[int]:
        if not self._admission.queued:
            return []
        return [self._ids[ticket] for ticket in self._admission.release(self._table.states())]

    def started(self, request_id: int) -> None:
        self._capacity.generated(1)
        self._admission.begun(self._tickets[request_id])

    def finished(self, request_id: int) -> None:
        ticket = self._tickets.pop(request_id)
        del self._ids[ticket]
        self._capacity.generated(self._trace.num_output[request_id] - 1)
        self._capacity.ended(1)
        self._admission.leave(ticket)


def admitted(case: Case) -> Callable[[Trace, Clock, RoutingTable], Gate]:
    """What `quire.router.simulate.run.simulate` makes gates with."""
    return lambda trace, clock, table: AdmissionGate(trace, clock, table, case=case)
