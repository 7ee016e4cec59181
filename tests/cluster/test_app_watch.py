"""The watch over an application reports missing replicas and a removed application."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentStatus, DeploymentStatusTrigger, ReplicaState
from ray.serve.schema import DeploymentStatusOverview

from quire.cluster.deploy.app_watch import AppWatch


def running(groups: int, message: str = "", status: str | None = None) -> dict[str, Any]:
    """The status with ``num`` running groups of two."""
    status = status or ("HEALTHY" if groups == 2 else "UNHEALTHY")
    deployments = {
        "ReplicaGroup": DeploymentStatusOverview(
            status=DeploymentStatus(status),
            status_trigger=DeploymentStatusTrigger.UNSPECIFIED,
            replica_states={ReplicaState.RUNNING: groups, ReplicaState.STARTING: 2 - groups},
            message=message,
        )
    }
    return {"app": SimpleNamespace(deployments=deployments)}


def test_a_group_that_is_not_replaced_is_told_once_and_again_after_twice_the_time() -> None:
    look_after = AppWatch("app", folder=None)
    told = {}
    for now_s in range(0, 120, 2):
        look_after.look(running(1, "no room"), now_s=now_s)
        if news := look_after.news():
            told[now_s] = news
    text = "1 of 2 groups run (ReplicaGroup: no room), for {} s"
    assert told == {16: [text.format(16)], 32: [text.format(32)], 64: [text.format(64)]}
    look_after.look(running(2), now_s=120)
    look_after.look(running(2), now_s=122)
    assert look_after.news() == ["all groups and gateways run again"]


def test_one_that_is_replaced_soon_is_not_told() -> None:
    look_after = AppWatch("app", folder=None)
    for now_s, groups in ((0, 2), (2, 1), (14, 1), (15, 2), (40, 1)):
        look_after.look(running(groups), now_s=now_s)
    assert not look_after.news()


def test_an_upgrade_is_no_trouble() -> None:
    look_after = AppWatch("app", folder=None)
    for now_s in (0, 20, 40):
        look_after.look(running(1, status="UPDATING"), now_s=now_s)
    assert not look_after.news()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_after = AppWatch("app", folder=tmp_path)
    disk = SimpleNamespace(used=97, free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    for now_s in (0, 20):
        look_after.look(running(1), now_s=now_s)
    (line,) = look_after.news()
    assert f"Ray's folder {tmp_path} is 97% full" in line


def test_an_application_that_was_stopped_by_others_is_gone() -> None:
    look_after = AppWatch("app", folder=None)
    look_after.look(running(2), now_s=0)
    assert not look_after.is_gone
    for now_s in (2, 4):
        look_after.look({}, now_s=now_s)  # A restart of Serve's controller looks alike.
    look_after.look(running(2), now_s=6)
    for now_s in (8, 16):
        look_after.look({}, now_s=now_s)
    assert not look_after.is_gone
    look_after.look({}, now_s=18)
    assert look_after.is_gone
