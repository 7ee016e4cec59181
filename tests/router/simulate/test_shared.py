"""Simulated groups that share cores, against results worked out by hand."""

from dataclasses import replace

import pytest

from quire.simulate.cost import CostModel
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace import Row, Trace
from quire.worker.request.errors import ConfigError

COST = CostModel(
    base=10.0, per_token=0.1, decode_base=5.0, decode_linear=0.0, num_cache_tokens=3200
)
CONFIG = SimulationConfig(num_groups=1, cost=COST)


def trace_of(*arrivals_ms: float) -> Trace:
    """A trace of unrelated prompts of 100 tokens, and answers of 3."""
    rows = [Row(arrival_ms, 100, 3, ()) for arrival_ms in arrivals_ms]
    return Trace.of(rows, name="by hand", block_size=32)


def test_steps_take_longer_while_other_groups_compute() -> None:
    config = replace(CONFIG, num_groups=2, policy="round_robin", contention=0.5)
    result = simulate(trace_of(0, 6), config)
    # The first prompt runs alone, its decodes beside the second's prompt, whose decodes run alone.
    assert result.first_token_ms == pytest.approx([20, 6 + 1.5 * 20])
    assert result.last_token_ms == pytest.approx([20 + 2 * 1.5 * 5, 36 + 2 * 5])
    with pytest.raises(ConfigError, match=r"contention=-1: must not be negative"):
        replace(config, contention=-1)
