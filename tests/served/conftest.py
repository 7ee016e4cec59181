"""One real cluster for all tests here: two replica groups of two ranks, gRPC and HTTP."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quire import demo_model
from quire.cluster.app import Endpoints, running_cluster
from quire.cluster.config import ClusterConfig
from quire.worker.config import EngineConfig

CONFIG = ClusterConfig(
    engine=EngineConfig(
        model=demo_model.PATH,
        tensor_parallel_size=2,
        dtype="float32",
        block_size=16,
        num_blocks=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    ),
    served_model_name="demo",
    num_groups=2,
    grpc_port=0,
    http_port=0,
    drain_timeout_s=2,
)


@pytest.fixture(scope="session")
def endpoints() -> Iterator[Endpoints]:
    before = _processes()
    with running_cluster(CONFIG) as endpoints:
        yield endpoints
    left = {pid: line for pid, line in _processes().items() if pid not in before}
    assert not left, f"processes that the cluster left behind: {left}"


@pytest.fixture
def channel(endpoints: Endpoints) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        yield channel


def _processes() -> dict[int, str]:
    """This user's processes of Ray and of ranks, those of other sessions of theirs included."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # It ended as we looked.
        if any(word in line for word in ("raylet", "gcs_server", "ray::", "quire.worker.rank")):
            found[int(entry.name)] = line
    return found
