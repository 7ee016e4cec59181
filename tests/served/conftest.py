"""Fixtures with a real Ray cluster for a module: two groups of two ranks, gRPC and HTTP."""

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import Endpoints, running_app
from quire.cluster.deploy.local import ray_session
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.worker.request.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # Processes of tests import `tests` from there.
from tests.served.paced_group import PACE, ReplicaGroup, set_pace  # noqa: E402

APP_NAME = "tested"
GROUPS_NAME = "tested:demo"
"""The Serve application of the groups."""
CONFIG = ClusterConfig(
    engine=EngineConfig(
        model=demo_model.PATH,
        tensor_parallel_size=2,
        dtype="float32",
        block_size=16,
        num_blocks=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_threads=1,
    ),
    served_model_name="demo",
    num_groups=2,
    grpc_port=0,
    http_port=0,
    drain_timeout_s=2,
)


@pytest.fixture(scope="module")
def pace_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file named by `PACE`, for all clusters of a module."""
    path = tmp_path_factory.mktemp("pace") / "seconds"
    set_pace(path, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PACE, str(path))
        yield path


@pytest.fixture
def pace(pace_file: Path) -> Iterator[Callable[[float], None]]:
    """Sets how many seconds groups wait before each step; 0 again after the test."""
    yield partial(set_pace, pace_file)
    set_pace(pace_file, 0)


@pytest.fixture(scope="module")
def endpoints(pace_file: Path) -> Iterator[Endpoints]:
    """A served cluster for one module.

    It ends with the module, since a process has one Ray at a time and some tests start their own.
    Tests use `pace` to be independent of the machine's speed.
    """
    config = replace(CONFIG, max_queue_wait_s=1000)
    with marked_processes(), paced_cluster(config) as endpoints:
        yield endpoints


@pytest.fixture(scope="module")
def scaled_endpoints(pace_file: Path) -> Iterator[Endpoints]:
    """A served cluster of 0 to 2 groups of one rank, which hand over streams without delay."""
    config = replace(
        CONFIG,
        engine=replace(CONFIG.engine, tensor_parallel_size=1, max_num_seqs=4),
        autoscaling=AutoscalingSettings(
            min_groups=0, max_groups=2, down_delay_s=1, down_step_s=1, idle_delay_s=8
        ),
        drain_timeout_s=0,
    )
    with marked_processes(), paced_cluster(config) as endpoints:
        yield endpoints


@contextlib.contextmanager
def paced_cluster(config: ClusterConfig) -> Iterator[Endpoints]:
    with ray_session(), running_app(config, name=APP_NAME, group=ReplicaGroup) as endpoints:
        yield endpoints


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    with marked_processes():
        yield


@pytest.fixture
def channel(endpoints: Endpoints) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        yield channel


@contextlib.contextmanager
def marked_processes() -> Iterator[None]:
    """Asserts that all processes started inside end within a minute after the block.

    Ray gives a node a second to end its workers. On a busy machine some outlive that, and end only
    once they notice that their node is gone.
    """
    name, value = "QUIRE_TEST_CLUSTER", str(uuid.uuid4())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)  # Inherited by child processes.
        yield
    deadline_s = time.monotonic() + 60
    while left := _processes_with(f"{name}={value}"):
        assert time.monotonic() < deadline_s, f"left behind: {left}"
        time.sleep(0.1)


def _processes_with(mark: str) -> dict[int, str]:
    """Command lines by id of the processes with ``mark`` in their environment."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # It has just ended, or is another user's.
    return found
