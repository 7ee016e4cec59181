"""Who goes first, said to Ray Serve's own scheduler; and what happens where it cannot be said."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_scheduler import (
    DeploymentDownscaleRequest,
    DeploymentScheduler,
    ReplicaSchedulingRequest,
    SpreadDeploymentSchedulingPolicy,
)

from quire.cluster.autoscaling import victims
from quire.cluster.autoscaling.victims import steer, stop_first

GROUPS, OTHERS = DeploymentID("groups", "quire"), DeploymentID("others", "quire")


@pytest.fixture
def steered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Serve's class as `stop_first` leaves it, for one test."""
    choose = DeploymentScheduler._get_replicas_to_stop
    monkeypatch.setattr(DeploymentScheduler, "_get_replicas_to_stop", choose)
    monkeypatch.setattr(victims, "_orders", {})
    victims._is_serve_steered.cache_clear()
    monkeypatch.setattr(victims, "_has_warned", False)
    # A test before may have started a cluster, which quiets Ray's logs and keeps them to itself.
    caplog.set_level(logging.WARNING, logger="ray.serve")
    log = logging.getLogger("ray.serve")
    monkeypatch.setattr(log, "propagate", False)
    log.addHandler(caplog.handler)
    yield
    log.removeHandler(caplog.handler)
    victims._is_serve_steered.cache_clear()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Ours: what tests before have left behind may log something too."""
    return [record for record in caplog.records if record.name == "ray.serve"]


def scheduler(*nodes_of_groups: str) -> DeploymentScheduler:
    """Serve's, with replicas a, b, c and d of two deployments, oldest first. The groups are alone
    on a node each, unless others are named."""
    nodes = SimpleNamespace(get_node_labels=lambda _: {})
    made = DeploymentScheduler(nodes, "head", create_placement_group_fn=lambda _: None)  # type: ignore[arg-type]
    for deployment in (GROUPS, OTHERS):
        made.on_deployment_created(deployment, SpreadDeploymentSchedulingPolicy())
        own = [f"{deployment.name}-{name}" for name in "abcd"]
        for name, node in zip("abcd", nodes_of_groups or own, strict=True):
            made.on_replica_running(ReplicaID(name, deployment), node)
    return made


def stopped(
    made: DeploymentScheduler, num: int, *, deployment: DeploymentID = GROUPS, **gangs: Any
) -> set[str]:
    request = DeploymentDownscaleRequest(deployment_id=deployment, num_to_stop=num, **gangs)
    return {each.unique_id for each in made.schedule({}, {deployment: request})[deployment]}


def say(order: str) -> None:
    stop_first(GROUPS, [ReplicaID(name, GROUPS) for name in order])


@pytest.mark.usefixtures("steered")
def test_the_groups_said_go_and_not_those_that_serve_would_take() -> None:
    made = scheduler()
    assert stopped(made, 1) == {"a"}
    assert stopped(made, 2) == {"a", "b"}
    say("cdba")
    assert stopped(made, 1) == {"c"}
    assert stopped(made, 3) == {"c", "d", "b"}
    assert stopped(made, 4) == {"a", "b", "c", "d"}


@pytest.mark.usefixtures("steered")
def test_the_latest_word_counts_and_those_gone_since_are_passed_over() -> None:
    made = scheduler()
    say("dcab")
    say("cadb")
    assert stopped(made, 1) == {"c"}
    made.on_replica_stopping(ReplicaID("c", GROUPS))
    assert stopped(made, 1) == {"a"}


@pytest.mark.usefixtures("steered")
def test_other_deployments_are_serves_matter() -> None:
    made = scheduler()
    say("dcba")
    assert stopped(made, 1, deployment=OTHERS) == {"a"}


@pytest.mark.usefixtures("steered")
def test_what_does_not_run_yet_goes_before_what_runs() -> None:
    made = scheduler()
    say("dcba")
    made.on_replica_recovering(ReplicaID("recovering", GROUPS))
    made._pending_replicas[GROUPS][ReplicaID("pending", GROUPS)] = object.__new__(
        ReplicaSchedulingRequest
    )
    chosen = made._get_replicas_to_stop(GROUPS, 2)
    assert {each.unique_id for each in chosen} == {"recovering", "pending"}
    chosen = made._get_replicas_to_stop(GROUPS, 3)
    assert {each.unique_id for each in chosen} == {"recovering", "pending", "d"}


@pytest.mark.usefixtures("steered")
def test_gangs_are_serves_matter() -> None:
    made = scheduler()
    say("dcba")
    replicas = {name: ReplicaID(name, GROUPS) for name in "abcd"}
    gangs = {replicas[name]: name for name in "abcd"}
    by_gang = {name: {replica} for name, replica in replicas.items()}
    given: dict[str, Any] = {
        "gang_id_by_replica": gangs,
        "replicas_by_gang_id": by_gang,
        "gang_size": 1,
    }
    assert stopped(made, 1, **given) == {"a"}


@pytest.mark.usefixtures("steered")
def test_nodes_that_can_be_given_back_are_emptied_first() -> None:
    """As Serve does; the order decides among groups whose nodes are as good as each other."""
    made = scheduler("head", "two", "one", "two")
    assert stopped(made, 2) == {"c", "d"}
    say("abcd")
    assert stopped(made, 1) == {"c"}
    assert stopped(made, 2) == {"c", "b"}
    assert stopped(made, 3) == {"c", "b", "d"}


@pytest.mark.usefixtures("steered")
def test_one_that_ran_only_after_the_order_keeps_serves_place() -> None:
    made = scheduler()
    say("dcb")
    assert stopped(made, 1) == {"a"}
    assert stopped(made, 2) == {"a", "d"}


class WithoutTheMethod:
    """A scheduler that chooses in some other way."""


class WithAnotherMethod:
    def _get_replicas_to_stop(self, request: Any) -> set[str]:
        return {"theirs"}


class WithAnotherInside:
    """Takes the same, but knows what runs under other names."""

    def _get_replicas_to_stop(
        self,
        deployment_id: str,
        max_num_to_stop: int,
        gang_id_by_replica: Any = None,
        replicas_by_gang_id: Any = None,
        gang_size: Any = None,
    ) -> set[str]:
        return {"theirs"}


@pytest.mark.usefixtures("steered")
@pytest.mark.parametrize("scheduler", [WithoutTheMethod, WithAnotherMethod])
def test_a_scheduler_that_is_not_known_is_left_alone_with_a_warning(
    scheduler: type, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(vars(scheduler))
    with caplog.at_level(logging.WARNING):
        assert not steer(scheduler)
        assert not steer(scheduler)
    assert dict(vars(scheduler)) == before
    (record,) = warnings_in(caplog)
    assert "is left to Ray Serve: _get_replicas_to_stop takes [" in record.getMessage()


@pytest.mark.usefixtures("steered")
def test_where_serve_has_changed_inside_its_choice_stands_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert steer(WithAnotherInside)
    victims._orders["groups"] = ("ours", "theirs")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert WithAnotherInside()._get_replicas_to_stop("groups", 1) == {"theirs"}
    (record,) = warnings_in(caplog)
    assert "is left to Ray Serve: AttributeError(" in record.getMessage()


@pytest.mark.usefixtures("steered")
def test_a_serve_without_a_scheduler_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("ray.serve._private.deployment_scheduler.DeploymentScheduler")
    with caplog.at_level(logging.WARNING):
        say("abcd")
        say("abcd")
    assert not victims._orders
    assert len(warnings_in(caplog)) == 1
