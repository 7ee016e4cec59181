"""Messages to a user during a slow or impossible start of a cluster."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger
from ray.serve.schema import DeploymentStatusOverview

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.build import check_here, checked
from quire.cluster.deploy.start import check_nodes, check_room, is_hopeless, obstacles
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError, ConfigError

TRACEBACK = """The replica failed to start.
ray::ServeReplica:quire:ReplicaGroup.initialize() (pid=1)
Traceback (most recent call last):
  File "somewhere.py", line 1, in start
quire.worker.request.errors.ConfigError: kv_cache_memory_bytes=10: too little"""


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
    lost = TRACEBACK.replace("ConfigError", "RankFailure")
    failed = {"ReplicaGroup": overview("UPDATING", lost)}
    assert obstacles(failed, is_over=False) == (
        "ReplicaGroup: failed as it started, and is started again"
    )
    assert not obstacles({"ReplicaGroup": overview("UPDATING", TRACEBACK)}, is_over=False)


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
    with pytest.raises(ConfigError, match=r"device='cuda': this machine has no GPU"):
        check_room(config(num_groups=1), on_gpu=True, machine={"CPU": 4.0})
    with pytest.raises(ConfigError, match=r"nodes_per_group=2: .* has one node"):
        check_nodes(config(nodes_per_group=2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': only the kernels for GPUs"),
        ({"kv_cache_memory_bytes": 1000}, "set kv_cache_memory_bytes=2621440 or more"),
        ({"kv_offloading_size": 1e6}, r"kv_offloading_size=1e\+06: only .* are free here"),
        ({"kv_disk_dir": "/proc/none"}, "kv_disk_dir='/proc/none': .*; name a folder"),
        ({"max_model_len": 10**6}, "max_model_len=1000000: the checkpoint was trained for 1024"),
    ],
)
def test_what_every_group_here_would_refuse_is_refused_before_any_starts(
    settings: dict[str, Any], message: str
) -> None:
    engine = EngineConfig(model=demo_model.PATH, **settings)
    with pytest.raises(ConfigError, match=message):
        check_here(ClusterConfig(engine=engine), {}, machine={"CPU": 2.0})


def test_on_another_machine_its_own_device_and_memory_count() -> None:
    engine = EngineConfig(model=demo_model.PATH, kv_cache_dtype="fp8", dtype="bfloat16")
    assert not checked(ClusterConfig(engine=replace(engine, kv_offloading_size=1e6)))[1]


def test_a_model_that_nothing_here_can_compute_is_refused_before_a_group_starts(
    tmp_path: Path,
) -> None:
    shutil.copytree(demo_model.PATH, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    fields = {"architectures": ["OwnForCausalLM"], "model_type": "own"}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(CheckpointError, match="neither Quire nor the installed transformers has"):
        checked(ClusterConfig(engine=EngineConfig(model=tmp_path / "model")))
