"""Messages to a user during a slow or impossible start of a cluster."""

from pathlib import Path

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import DeploymentStatusOverview

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.start import check_nodes, check_room, is_hopeless, obstacles
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import ConfigError

TRACEBACK = """The replica failed to start.
ray::ServeReplica:quire:ReplicaGroup.initialize() (pid=1)
Traceback (most recent call last):
  File "somewhere.py", line 1, in start
quire.worker.api.errors.ConfigError: kv_cache_memory_bytes=10: too little"""


def overview(status: str, message: str) -> DeploymentStatusOverview:
    return DeploymentStatusOverview(
        status=DeploymentStatus(status),
        status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
        replica_states={},
        message=message,
    )


def test_what_a_deployment_waits_for_is_told_in_one_line() -> None:
    told = obstacles(
        {
            "Gateway": overview("HEALTHY", "as it was"),
            "ReplicaGroup": overview("UPDATING", "1 replicas wait\nfor resources: {'GPU': 1.0}."),
        }
    )
    assert told == "ReplicaGroup: 1 replicas wait for resources: {'GPU': 1.0}."


def test_a_replica_that_gets_new_settings_is_not_taken_for_a_slow_start() -> None:
    """Serve counts from the replica's start, which may be days ago."""
    slow = (
        "Deployment 'Gateway' in application 'm' has 1 replicas that have taken more than 30s to "
        "initialize.\nThis may be caused by a slow __init__ or reconfigure method."
    )
    assert not obstacles({"Gateway": overview("UPDATING", slow)})


def test_of_a_traceback_what_was_raised_is_told() -> None:
    told = obstacles({"ReplicaGroup": overview("DEPLOY_FAILED", TRACEBACK)})
    assert told == "ReplicaGroup: ConfigError: kv_cache_memory_bytes=10: too little"


def test_what_failed_and_is_tried_again_is_told_without_what_is_told_at_the_end() -> None:
    failed = {"ReplicaGroup": overview("UPDATING", TRACEBACK)}
    assert obstacles(failed, is_over=False) == (
        "ReplicaGroup: failed as it started, and is started again"
    )


@pytest.mark.parametrize(
    ("status", "message", "hopeless"),
    [
        ("UPDATING", TRACEBACK, True),
        ("UPDATING", TRACEBACK.replace("ConfigError", "RankFailure"), False),
        ("UPDATING", "1 replicas wait for resources", False),
        ("HEALTHY", TRACEBACK, False),
    ],
)
def test_a_start_ends_at_the_first_failure_that_would_come_again(
    status: str, message: str, hopeless: bool
) -> None:
    assert is_hopeless({"ReplicaGroup": overview(status, message)}) == hopeless


def config(**fields: object) -> ClusterConfig:
    engine = EngineConfig(model=Path("model"), tensor_parallel_size=2)
    return ClusterConfig(engine=engine, **fields)  # type: ignore[arg-type]


def test_groups_that_one_machine_has_no_room_for_are_refused() -> None:
    """Ray would wait for another machine for ever."""
    machine = {"CPU": 4.0, "GPU": 3.0}
    check_room(config(num_groups=2), on_gpu=False, machine=machine)
    check_room(config(num_groups=1, cpus_per_group=4), on_gpu=True, machine=machine)
    with pytest.raises(ConfigError, match=r"reserve 4 GPUs, and this machine has 3; .*'cpu'"):
        check_room(config(num_groups=2), on_gpu=True, machine=machine)
    with pytest.raises(ConfigError, match=r"reserve 1 CPU, and this machine has 0"):
        check_room(config(num_groups=1, cpus_per_group=1), on_gpu=False, machine={})
    with pytest.raises(ConfigError, match=r"reserve 6 CPUs, and this machine has 4; .*cpus_per"):
        check_room(config(num_groups=2, cpus_per_group=3), on_gpu=False, machine=machine)
    with pytest.raises(ConfigError, match=r"nodes_per_group=2: .* has one node"):
        check_nodes(config(nodes_per_group=2))
