"""Watches a running cluster: whether it still exists, and has all its groups and gateways.

Serve replaces failed ones, but does not report when it cannot, for example because a disk is full.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from quire.cluster.deploy.names import deployments_of
from quire.cluster.deploy.start import label_of, num_running, obstacles

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

_LOOK_EVERY_S = 2.0
_PATIENCE_S = 15.0
"""Time before missing replicas are reported: most groups are replaced sooner. It doubles with each
report."""
_GONE_S = 10.0  # A restarted Serve controller knows no application for a moment.
_JOIN_S = 5.0  # After this process has left Ray, a call would start another cluster.
_AS_TOLD = ("UPDATING", "DOWNSCALING")
_FULL = 0.95
"""The share of a disk from which on Ray considers it full."""


class AppWatch:
    """Checks the application ``name`` every `_LOOK_EVERY_S` while the block runs. It uses a
    thread, because a call to a Ray that has died may never return."""

    def __init__(self, name: str, *, folder: Path | None) -> None:
        """``folder`` is a folder of Ray's on this machine, whose disk is checked."""
        self._name = name
        self._folder = folder
        self._news: list[str] = []
        self._since_s: float | None = None
        self._missed_s: float | None = None
        self._told_after_s = _PATIENCE_S
        self.is_gone = False
        """Whether another process has stopped the application."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="quire-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)

    def news(self) -> list[str]:
        """Removes and returns the lines to report."""
        news, self._news = self._news, []
        return news

    def _repeat(self) -> None:
        from ray import serve

        while not self.is_gone and not self._ended.wait(_LOOK_EVERY_S):
            # Ray raises many kinds of error once it has died, which the session notices.
            with contextlib.suppress(Exception):
                self.look(serve.status().applications, now_s=time.monotonic())

    def look(self, applications: "Mapping[str, ApplicationStatusOverview]", now_s: float) -> None:
        if self._name not in applications:
            if self._missed_s is None:
                self._missed_s = now_s
            self.is_gone = now_s - self._missed_s >= _GONE_S
            return
        self._missed_s = None
        found = missing(deployments_of(self._name, applications))
        if not found:
            if self._told_after_s > _PATIENCE_S:
                self._news.append("all groups and gateways run again")
            self._since_s, self._told_after_s = None, _PATIENCE_S
            return
        if self._since_s is None:
            self._since_s = now_s
        lasted_s = now_s - self._since_s
        if lasted_s >= self._told_after_s:
            self._told_after_s = 2 * lasted_s
            self._news.append(f"{found}, for {lasted_s:.0f} s{self._why()}")

    def _why(self) -> str:
        if self._folder is None or not self._folder.exists():
            return ""
        disk = shutil.disk_usage(self._folder)
        share = disk.used / (disk.used + disk.free)
        if share < _FULL:
            return ""
        return (
            f". The disk of Ray's folder {self._folder} is {share:.0%} full: processes that cannot "
            "write there do not start; free some of it"
        )


def missing(deployments: "Mapping[str, DeploymentStatusOverview]") -> str:
    """Which deployments lack running replicas, with Serve's messages; empty if none does. One that
    is being upgraded or scaled down does not count."""
    short = {}
    for name, each in deployments.items():
        running = num_running(each)
        wanted = sum(n for state, n in each.replica_states.items() if state != "STOPPING")
        is_whole = each.status == "HEALTHY" and running == wanted
        if not is_whole and each.status not in _AS_TOLD:
            short[name] = f"{running} of {wanted} {label_of(name)} run"
    if not short:
        return ""
    said = obstacles({name: deployments[name] for name in short})
    return ", ".join(short.values()) + (f" ({said})" if said else "")
