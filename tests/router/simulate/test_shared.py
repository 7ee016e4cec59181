"""Groups that share cores, and gateways that hold requests back: worked out by hand."""

from dataclasses import replace

import pytest

from quire.router.simulate.clock import Clock
from quire.router.simulate.cost import CostModel
from quire.router.simulate.gate import Gate
from quire.router.simulate.group import Group
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace import Row, Trace
from quire.router.table import RoutingTable
from quire.worker.errors import ConfigError

COST = CostModel(
    base=10.0, per_token=0.1, decode_base=5.0, decode_linear=0.0, num_cache_tokens=3200
)
CONFIG = SimulationConfig(num_groups=1, cost=COST)


def trace_of(*arrivals_ms: float) -> Trace:
    """Prompts of 100 tokens that share nothing, and answers of 3."""
    rows = [Row(arrival_ms, 100, 3, ()) for arrival_ms in arrivals_ms]
    return Trace.of(rows, name="by hand", block_size=32)


def test_steps_take_longer_while_other_groups_compute() -> None:
    config = replace(CONFIG, num_groups=2, policy="round_robin", contention=0.5)
    result = simulate(trace_of(0, 6), config)
    # The first begins alone, its two decodes beside the second's prompt; that one's are alone.
    assert result.first_token_ms == pytest.approx([20, 6 + 1.5 * 20])
    assert result.last_token_ms == pytest.approx([20 + 2 * 1.5 * 5, 36 + 2 * 5])
    with pytest.raises(ConfigError, match=r"contention=-1: must not be negative"):
        replace(config, contention=-1)


class OneAtATime:
    """Lets a request go when the one before it has ended."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.current: int | None = None
        self.log: list[str] = []

    def offer(self, request_id: int) -> bool:
        if self.current is None:
            self.current = request_id
            return True
        self.waiting.append(request_id)
        return False

    def routed(self, request_id: int) -> None:
        self.log.append(f"routed {request_id}")

    def frame(self, index: int, group: Group) -> None:
        assert index == 0
        self.log.append(f"frame {group.num_prompt_tokens} {group.num_output_tokens}")

    def release(self) -> list[int]:
        if self.current is None and self.waiting:
            self.current = self.waiting.pop(0)
            return [self.current]
        return []

    def started(self, request_id: int) -> None:
        self.log.append(f"started {request_id}")

    def finished(self, request_id: int) -> None:
        self.log.append(f"finished {request_id}")
        self.current = None


def test_a_gate_holds_requests_at_the_gateway() -> None:
    gates: list[OneAtATime] = []

    def make(trace: Trace, clock: Clock, table: RoutingTable) -> Gate:
        assert len(trace) == 2
        gates.append(OneAtATime())
        return gates[-1]

    config = replace(CONFIG, use_table=True)
    free = simulate(trace_of(0, 5), config)
    assert free.first_token_ms == pytest.approx([20, 20 + 20 + 5])
    held = simulate(trace_of(0, 5), config, make_gate=make)
    assert held.first_token_ms == pytest.approx([20, 30 + 20])
    assert gates[0].log == [
        *("routed 0", "started 0", "frame 100 1"),
        *("finished 0", "frame 100 3", "routed 1"),
        *("started 1", "frame 200 4", "finished 1", "frame 200 6"),
    ]
    with pytest.raises(ConfigError, match=r"use_table=False: gates look at what is in the table"):
        simulate(trace_of(0, 5), CONFIG, make_gate=make)
