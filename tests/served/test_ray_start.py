"""Starts of Ray that fail: the raylet is late, as when its port is taken, or a signal ends the
process first."""

import itertools
import os
import signal
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import node, services, worker

from quire.cluster.deploy.local import ray_session
from quire.cluster.errors import StartFailed

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("no_process_is_left")]


class LateRaylets:
    """The first ``num_late`` nodes never register."""

    def __init__(self, patch: pytest.MonkeyPatch, *, num_late: int) -> None:
        self._get_node: Any = services.get_node
        self._num_late = num_late
        self._seen: dict[str, None] = {}
        patch.setattr(services, "get_node", self._get_node_if_in_time)
        # Ray's timeout of half a minute passes between two reads of the clock.
        clock = itertools.count(step=20.0)
        late = SimpleNamespace(monotonic=lambda: next(clock), time=time.time, sleep=time.sleep)
        patch.setattr(node, "time", late)

    def _get_node_if_in_time(self, gcs_address: str, node_id: str) -> Any:
        self._seen[node_id] = None
        end_s = time.monotonic() + 60
        while True:  # A running raylet has written to its log.
            try:
                found = self._get_node(gcs_address, node_id)
                break
            except RuntimeError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)
        if list(self._seen).index(node_id) < self._num_late:
            raise RuntimeError("not in time")
        return found


def test_another_node_is_started_when_a_raylet_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LateRaylets(monkeypatch, num_late=1)
    with ray_session() as session:
        assert session.logs is not None
        # Ray makes its files accessible to all, but below a folder that only we can enter.
        private = session.logs.parents[3]
        assert private.parent == Path(tempfile.gettempdir())
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert session.lost() is None
        assert ray.get(ray.remote(lambda: 5).remote()) == 5
        assert len([each for each in ray.nodes() if each["Alive"]]) == 1


def test_when_none_comes_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    LateRaylets(monkeypatch, num_late=100)
    with (
        pytest.raises(StartFailed, match=r"(?s)in 3 attempts .*last words: .*raylet"),
        ray_session(),
    ):
        pass


@pytest.mark.parametrize(
    ("number", "owner", "name", "happens"),
    [(signal.SIGTERM, services, "get_node", False), (signal.SIGINT, worker, "connect", True)],
)
def test_a_signal_while_it_starts_leaves_nothing_behind(
    number: signal.Signals, owner: Any, name: str, happens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = getattr(owner, name)
    has_happened = []

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(number)
        result = step(*args, **options)
        has_happened.append(True)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    before = signal.getsignal(number)
    # Socket paths under pytest's own folder would be too long.
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with pytest.raises(KeyboardInterrupt), ray_session():
            pass
        assert os.listdir(folder) == []
    assert signal.getsignal(number) is before
    # Half a connection would crash this process at its end.
    assert bool(has_happened) == happens
