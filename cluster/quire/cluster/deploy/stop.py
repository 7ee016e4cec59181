"""Stops a cluster's applications within a time limit, even if Ray has died.

Serve's own calls would wait without limit for a controller that is gone.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from quire.cluster.deploy.names import application_of, parts_among
from quire.cluster.deploy.processes import finished
from quire.cluster.deploy.session import RaySession
from quire.cluster.errors import ClusterLost

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

STOP_MARGIN_S = 10.0
"""Serve kills a replica that still runs this long after its drain should have ended."""
_SERVE_MARGIN_S = 15.0  # For everything but the drain: Serve's controller, processes that end.
_LOOK_EVERY_S = 0.2
_LET_GO_S = 2.0


def stop_app(name: str, session: RaySession, *, drain_timeout_s: float) -> None:
    """Has Serve drain and stop the cluster ``name``: its gateways first, because their streams need
    the groups, then the groups. If Ray has died, drains the gateways without it.

    Raises:
        ClusterLost: Ray has died, or Serve takes longer than the limit.
    """
    limit_s = drain_timeout_s + STOP_MARGIN_S + _SERVE_MARGIN_S
    end_s = time.monotonic() + limit_s

    def is_over() -> bool:
        return time.monotonic() > end_s or (session.can_drain and session.lost() is not None)

    is_stopped = _delete_apps([name], is_over)
    parts: list[str] = []
    if is_stopped:
        end_s = time.monotonic() + limit_s
        is_stopped = finished(lambda: parts.extend(_parts(name)), unless=is_over) and (
            not parts or _delete_apps(parts, is_over)
        )
    what = session.lost()
    if what and session.can_drain:
        is_drained = session.drain(timeout_s=drain_timeout_s + _SERVE_MARGIN_S)
        raise ClusterLost(f"{what}; {'all' if is_drained else 'not all'} streams have ended")
    if not is_stopped:
        late = f"Ray Serve did not stop {name!r} within {limit_s:g} s"
        raise ClusterLost(f"{what}; {late}" if what else late)
    if what:
        raise ClusterLost(f"{what}; Ray Serve has stopped {name!r}")


def let_go(handle: "DeploymentHandle[Any]") -> None:
    """Shuts a handle down. For an autoscaled deployment, its thread in this process would continue
    to report calls to Serve's controller, even to that of a later Ray cluster."""
    end_s = time.monotonic() + _LET_GO_S
    with contextlib.suppress(Exception):  # Ray raises many kinds of error if it has died.
        finished(handle.shutdown, unless=lambda: time.monotonic() > end_s)


def stop_parts(name: str, parts: Iterable[str], *, drain_timeout_s: float) -> None:
    """Has Serve drain and stop the groups with these ``parts``. Raises ClusterLost: it takes longer
    than the limit."""
    apps = [application_of(name, part) for part in parts]
    limit_s = drain_timeout_s + STOP_MARGIN_S + _SERVE_MARGIN_S
    end_s = time.monotonic() + limit_s
    if apps and not _delete_apps(apps, lambda: time.monotonic() > end_s):
        raise ClusterLost(f"Ray Serve did not stop {', '.join(apps)} within {limit_s:g} s")


def _parts(name: str) -> list[str]:
    from ray import serve

    return [application_of(name, part) for part in parts_among(name, serve.status().applications)]


def _delete_apps(names: Sequence[str], is_over: Callable[[], bool]) -> bool:
    """Stops applications; returns whether Serve did so before ``is_over`` was true. Serve's own
    wait ends after a minute, however long replicas may take."""
    from ray import serve

    apps = set(names)

    def delete() -> None:
        for name in names:
            serve.delete(name, _blocking=False)

    def look() -> None:
        apps.intersection_update(serve.status().applications)

    try:
        if is_over() or not finished(delete, unless=is_over):
            return False
        while finished(look, unless=is_over):
            if not apps:
                return True
            time.sleep(_LOOK_EVERY_S)
    except Exception:  # Ray raises many kinds. If it has died, the caller reports that instead.
        if not is_over():
            raise
    return False
