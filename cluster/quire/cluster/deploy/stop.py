"""Stops a cluster's applications within a limit, whatever has become of Ray meanwhile.

Serve's own calls wait without end for a controller that is gone.
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
"""Serve kills a replica that is not gone so long after its drain should have ended."""
_SERVE_MARGIN_S = 15.0  # For what is not the drain: Serve's controller, processes that end.
_LOOK_EVERY_S = 0.2
_LET_GO_S = 2.0


def stop_app(name: str, session: RaySession, *, drain_timeout_s: float) -> None:
    """Has Serve drain and stop the cluster ``name``: its gateways first, while the groups run that
    their streams need, then the groups. Drains it without Serve where Ray has died.

    Raises:
        ClusterLost: Ray has died, or Serve takes longer than it may.
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
    """Ends what a handle does by itself: where its deployment is scaled, a thread of this process
    tells Serve's controller of calls, also of a later Ray."""
    end_s = time.monotonic() + _LET_GO_S
    with contextlib.suppress(Exception):  # Of many kinds, where Ray has died.
        finished(handle.shutdown, unless=lambda: time.monotonic() > end_s)


def stop_parts(name: str, parts: Iterable[str], *, drain_timeout_s: float) -> None:
    """Has Serve drain and stop the groups of some of the models. Raises ClusterLost: it takes
    longer than it may."""
    apps = [application_of(name, part) for part in parts]
    limit_s = drain_timeout_s + STOP_MARGIN_S + _SERVE_MARGIN_S
    end_s = time.monotonic() + limit_s
    if apps and not _delete_apps(apps, lambda: time.monotonic() > end_s):
        raise ClusterLost(f"Ray Serve did not stop {', '.join(apps)} within {limit_s:g} s")


def _parts(name: str) -> list[str]:
    from ray import serve

    return [application_of(name, part) for part in parts_among(name, serve.status().applications)]


def _delete_apps(names: Sequence[str], is_over: Callable[[], bool]) -> bool:
    """Whether Serve stopped the applications before it ``is_over``. Serve's own wait gives up after
    a minute, whatever a replica may take."""
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
    except Exception:  # Ray's own, of many kinds; where it has died, that is what is told.
        if not is_over():
            raise
    return False
