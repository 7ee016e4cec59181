"""A Ray node whose raylet is late, as one is that finds its port taken."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import node, services

from quire.cluster.errors import StartFailed
from quire.cluster.local import ray_session

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]


class LateRaylets:
    """The first ``num_late`` nodes that start never say that they are there."""

    def __init__(self, patch: pytest.MonkeyPatch, *, num_late: int) -> None:
        self._get_node: Any = services.get_node
        self._num_late = num_late
        self._seen: dict[str, None] = {}
        patch.setattr(services, "get_node", self._get_node_if_in_time)
        # Ray's half a minute passes within two of its looks at the clock.
        clock = itertools.count(step=20.0)
        late = SimpleNamespace(monotonic=lambda: next(clock), time=time.time, sleep=time.sleep)
        patch.setattr(node, "time", late)

    def _get_node_if_in_time(self, gcs_address: str, node_id: str) -> Any:
        self._seen[node_id] = None
        if list(self._seen).index(node_id) < self._num_late:
            raise RuntimeError("not in time")
        while True:
            try:
                return self._get_node(gcs_address, node_id)
            except RuntimeError:
                time.sleep(0.1)


def test_another_node_is_started_when_a_raylet_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LateRaylets(monkeypatch, num_late=1)
    with ray_session() as logs:
        assert logs is not None
        assert ray.get(ray.remote(lambda: 5).remote()) == 5
        assert len([each for each in ray.nodes() if each["Alive"]]) == 1


def test_when_none_comes_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    LateRaylets(monkeypatch, num_late=100)
    with (
        pytest.raises(StartFailed, match=r"(?s)in 3 attempts .*last words: .*raylet"),
        ray_session(),
    ):
        pass
