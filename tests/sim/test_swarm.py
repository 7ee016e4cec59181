"""Runs of clusters, loads and faults drawn from seeds. `tests.sim.world` has the checks.

For more runs: ``python -m tests.sim --seeds 0-1000 --seconds 3600``.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tests.sim.__main__ import command
from tests.sim.asks import Wrong
from tests.sim.clients import Load
from tests.sim.cluster import ClusterPlan
from tests.sim.faults import ChaosPlan
from tests.sim.swarm import draw_plan
from tests.sim.world import Plan, Result, run

from quire.cluster.errors import Overloaded
from quire.cluster.gateway.deadline import Deadline
from quire.cluster.gateway.send import Reader
from quire.cluster.links.group_client import GroupClient
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.serving.admission import Admission
from quire.cluster.serving.ticket import Stage, Ticket
from quire.router.table import RoutingTable
from quire.worker.cache.block_pool import BlockPool
from quire.worker.request.request import Prepared

ROOT = Path(__file__).resolve().parents[2]
LENGTH_S = 60.0

CALM = Plan(
    load=Load(rate=0.5, mean_output=60, p_deadline=0.3, p_several=0.3),
    length_s=60.0,
    quiet_s=20.0,
)
LIVELY = Plan(
    cluster=ClusterPlan(num_gateways=2),
    load=Load(rate=2.0, mean_output=60),
    chaos=ChaosPlan(kinds=("reset", "partition", "frames repeated", "old frames"), pause_s=5.0),
    length_s=30.0,
    quiet_s=20.0,
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Silences logs, since lost groups are the rule here."""
    with caplog.at_level(logging.CRITICAL):
        yield


def run_seed(seed: int, *, length_s: float = LENGTH_S) -> Result:
    try:
        return run(draw_plan(seed, length_s=length_s), seed=seed)
    except Exception as error:
        error.add_note(f"seed {seed}; again: {command(seed, length_s)}")
        raise


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]
)
def test_the_cluster_keeps_its_promise(seed: int) -> None:
    result = run_seed(seed)
    assert result.outcomes["done"] > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_digest_in_any_process() -> None:
    ours = run_seed(3, length_s=10).digest
    assert ours == run_seed(3, length_s=10).digest
    assert ours != run_seed(4, length_s=10).digest
    program = (
        "from tests.sim.swarm import draw_plan; from tests.sim.world import run; "
        "print(run(draw_plan(3, length_s=10), seed=3).digest)"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        theirs = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert theirs.strip() == ours


def _resumes_a_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Reader.read

    def read(self: Reader, deltas: Any) -> Any:
        found = original(self, deltas)
        token_ids = self._one.output.token_ids
        if len(token_ids) == 7:
            token_ids.pop()
        return found

    monkeypatch.setattr(Reader, "read", read)


def _believes_any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def push(self: GroupStream, delta: Any) -> bool:
        self._deltas.append(delta)
        self._wake()
        return True

    monkeypatch.setattr(GroupStream, "push", push)


def _shares_blocks_that_are_not_full(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.match

    def match(self: BlockPool, hashes: Any) -> Any:
        found = original(self, hashes)
        return found[:-1] + found[:1] if len(found) > 3 else found

    monkeypatch.setattr(BlockPool, "match", match)


def _keeps_requests_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutingTable, "completed", lambda self, request_id, **_: None)


def _loses_no_stream_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GroupClient._detach

    def detach(self: GroupClient, ending: Any, **options: Any) -> None:
        self._streams.clear()
        original(self, ending, **options)

    monkeypatch.setattr(GroupClient, "_detach", detach)


def _keeps_places_of_those_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Admission.leave

    def leave(self: Admission, ticket: Ticket) -> None:
        if ticket.stage is Stage.QUEUED:  # Otherwise it would be missed as soon as its turn came.
            original(self, ticket)

    monkeypatch.setattr(Admission, "leave", leave)


def _refuses_while_groups_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Admission.offer

    def offer(self: Admission, ticket: Ticket, loads: Any, *, now_s: float) -> Any:
        if loads and not loads.num_requests.any():
            raise Overloaded("not now", reason="wait", retry_after_s=1.0)
        return original(self, ticket, loads, now_s=now_s)

    monkeypatch.setattr(Admission, "offer", offer)


def _forgets_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Deadline.__init__

    def init(self: Deadline, deadline_s: float, *, clock: Callable[[], float]) -> None:
        original(self, inf, clock=clock)

    monkeypatch.setattr(Deadline, "__init__", init)


def _gives_all_answers_the_same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Prepared.completions

    def completions(self: Prepared) -> Iterator[Prepared]:
        for one in original(self):
            yield replace(one, sampling=replace(one.sampling, seed=self.sampling.seed))

    monkeypatch.setattr(Prepared, "completions", completions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it",
    [
        _resumes_a_token_early,
        _believes_any_attempt,
        _shares_blocks_that_are_not_full,
        _keeps_requests_in_the_table,
        _loses_no_stream_with_its_group,
        _keeps_places_of_those_who_left,
        _refuses_while_groups_idle,
        _forgets_deadlines,
        _gives_all_answers_the_same_seed,
    ],
)
def test_what_is_broken_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation detects planted bugs."""

    def run_some() -> None:
        for plan in (CALM, LIVELY):
            run(plan, seed=1)
        for seed in range(4):
            run_seed(seed, length_s=60)

    break_it(monkeypatch)
    with pytest.raises((Wrong, AssertionError)):
        run_some()
