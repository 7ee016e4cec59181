"""Looks after a cluster that serves: whether it is there, and whole.

Serve replaces what fails, and tells nobody where it cannot: its node's disk is full, say.
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
"""Most groups are replaced sooner. The time doubles with each time that it is told."""
_GONE_S = 10.0  # A controller of Serve's that starts again knows no application for a moment.
_JOIN_S = 5.0  # It must not ask once this process has left Ray, which would start another cluster.
_AS_TOLD = ("UPDATING", "DOWNSCALING")
_FULL = 0.95
"""Ray takes a disk for full from here on."""


class AppWatch:
    """Looks at the application ``name`` every `_LOOK_EVERY_S`, in a thread, while the
    block runs: a question to a Ray that has died may never return."""

    def __init__(self, name: str, *, folder: Path | None) -> None:
        """``folder`` is one of Ray's, on this machine."""
        self._name = name
        self._folder = folder
        self._news: list[str] = []
        self._since_s: float | None = None
        self._missed_s: float | None = None
        self._told_after_s = _PATIENCE_S
        self.is_gone = False
        """Another process has stopped the application."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="quire-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)

    def news(self) -> list[str]:
        """What is to be told, once."""
        news, self._news = self._news, []
        return news

    def _repeat(self) -> None:
        from ray import serve

        while not self.is_gone and not self._ended.wait(_LOOK_EVERY_S):
            # Many kinds of error are possible once Ray has died, which the session notices.
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
    """Which deployments lack replicas that run, and what Serve says of it; empty where none does.
    One that is upgraded, or has too many, lacks none."""
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
