import itertools
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from quire.cluster.deploy import local
from quire.cluster.deploy.local import ray_session
from quire.cluster.errors import StartFailed
from quire.worker.request.errors import ConfigError

NICENESS = "RAY_worker_niceness"


@pytest.mark.parametrize(("theirs", "holds"), [(None, "0"), ("5", "5")])
def test_workers_have_the_niceness_of_ours_unless_the_user_says_another(
    theirs: str | None, holds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(logging.Logger, "setLevel", lambda *_: None)  # It would last.
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {NICENESS: theirs} if theirs else {})
        with ray_session(address="somewhere"):
            assert os.environ[NICENESS] == holds


@pytest.mark.parametrize("num_late", [0, 4])
def test_a_raylet_that_still_starts_when_ray_gives_up_is_no_failed_attempt(
    num_late: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    why = "[2026-01-01 00:00:00,000 C 1 1] (raylet) main.cc:1: Check failed: no port"
    (logs / "raylet.out").write_text(f"{why}\n\x1b[31m*** stack ***\x1b[0m\n    @ 0x1 f()\n")
    is_late = itertools.chain([True] * num_late, itertools.repeat(False))

    def late(**_: object) -> None:
        raise RuntimeError("not in time")

    monkeypatch.setattr(local, "_has_raylet", lambda _: next(is_late))
    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(local, "_STARVED_S", 0.0)
    node = SimpleNamespace(kill_all_processes=lambda check_alive: None)
    monkeypatch.setattr(local, "_half_started", lambda _: node)
    with pytest.raises(StartFailed) as failed:
        local._start_node(tmp_path, without_gcs_s=1)
    assert f"in {num_late + 3} attempts" in str(failed.value)
    assert str(failed.value).endswith(f"last words: {why}")


def test_a_home_that_cannot_be_written_is_named_with_what_wants_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(**_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(ConfigError, match=r"keep its token in ~/.ray .*'/nowhere'.* set HOME"):
        local._start_node(tmp_path, without_gcs_s=1)
