"""Detection of a lost Ray without calls to Ray, with stand-in processes and sockets."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from quire.cluster.deploy import session
from quire.cluster.deploy.line import Line
from quire.cluster.deploy.processes import end_all_with, finished
from quire.cluster.deploy.session import OthersCluster, OwnNode

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def test_a_raylet_that_dies_is_noticed_and_left_a_zombie() -> None:
    """Groups and gateways watch the raylet's process, and exit when it is gone."""
    with (
        tempfile.TemporaryDirectory(prefix="q") as folder,
        Line(Path(folder) / "line") as line,
        subprocess.Popen(SLEEP) as raylet,
    ):
        node = OwnNode(logs=None, line=line, pids={"raylet": raylet.pid})
        assert node.lost() is None
        raylet.kill()
        os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
        for _ in range(2):
            assert node.lost() == f"Ray's raylet (process {raylet.pid}) ended with SIGKILL"
        os.kill(raylet.pid, 0)  # It still exists, as a zombie.
        assert raylet.wait() == -signal.SIGKILL
        assert node.lost() == f"Ray's raylet (process {raylet.pid}) ended"


def test_a_cluster_of_others_is_lost_when_its_gcs_stays_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "_LOOK_EVERY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        address = f"127.0.0.1:{gcs.getsockname()[1]}"
        cluster = OthersCluster(gcs=address, raylet=None)
        assert cluster.lost() is None
    assert cluster.lost() is None, "it may come again"
    monkeypatch.setattr(session, "_SILENCE_S", 0.0)
    assert cluster.lost() == f"Ray's GCS at {address} has not answered for 0 s"


def test_a_cluster_of_others_is_lost_when_our_raylet_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK_EVERY_S", 0.0)
    with tempfile.TemporaryDirectory(prefix="q") as folder:
        path = f"{folder}/raylet"
        with socket.socket(socket.AF_UNIX) as raylet:
            raylet.bind(path)
            raylet.listen()
            cluster = OthersCluster(gcs=None, raylet=path)
            assert cluster.lost() is None
        assert cluster.lost() == f"Ray's raylet on this machine ({path}) does not answer"


def test_a_call_that_hangs_is_left_alone_and_one_that_fails_raises() -> None:
    may_end = threading.Event()
    assert not finished(may_end.wait, unless=lambda: True)
    may_end.set()
    assert finished(list, unless=lambda: False)
    with pytest.raises(ZeroDivisionError):
        finished(lambda: 1 / 0, unless=lambda: False)


def test_processes_are_found_by_what_they_inherited_though_their_parent_is_gone() -> None:
    orphaned = f"import subprocess; print(subprocess.Popen({SLEEP!r}, stdout=-3).pid)"
    name, value = "QUIRE_TEST_MARK", str(os.getpid())
    parent = subprocess.run(
        [sys.executable, "-c", orphaned],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        check=True,
    )
    orphan = Path("/proc") / parent.stdout.decode().strip()
    assert orphan.exists()
    end_all_with(f"{name}={value}", [])
    assert not orphan.exists() or "(zombie)" in (orphan / "status").read_text()
