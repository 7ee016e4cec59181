"""How far each replica has come with its start, told to the process that waits for it.

Replicas may run on any node, and Serve tells nothing of one that starts. So each keeps its steps
under a key of its own in Ray's key-value store, until it has started or failed.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)

_NAMESPACE = b"quire-starts"

Steps = list[tuple[str, float]]
"""The steps of one start, with when each began, by the wall clock."""


class StartSteps:
    """The steps of this process's replica ``replica`` of the application ``app``. They are told
    while the block runs, and logged."""

    def __init__(self, app: str, replica: str) -> None:
        self._key = f"{app}#{replica}".encode()
        self._steps: Steps = []

    def begin(self, name: str) -> None:
        """The one before has ended."""
        _log.info("start: %s", name)
        self._steps.append((name, time.time()))
        self._put(json.dumps(self._steps).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._put(None)

    def _put(self, value: bytes | None) -> None:
        import ray
        from ray.experimental import internal_kv

        if not ray.is_initialized():  # Ray would start a cluster to ask.
            return
        try:
            if value is None:
                internal_kv._internal_kv_del(self._key, namespace=_NAMESPACE)
            else:
                internal_kv._internal_kv_put(self._key, value, namespace=_NAMESPACE)
        except Exception as error:  # Ray's own, of many kinds: a start does not fail by its report.
            _log.debug("the start's steps cannot be told: %r", error)


def steps_of(name: str) -> dict[str, Steps]:
    """The steps of each replica of the cluster ``name`` that is starting now, by its id."""
    from ray.experimental import internal_kv

    found: dict[str, Steps] = {}
    with contextlib.suppress(Exception):  # As above.
        for prefix in _prefixes(name):
            for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE):
                value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
                if value is not None:
                    replica = key.decode().partition("#")[2]
                    found[replica] = [(step, float(began_s)) for step, began_s in json.loads(value)]
    return found


@contextlib.contextmanager
def forgotten_at_end(name: str) -> Iterator[None]:
    """Removes, after the block, what replicas of the cluster ``name`` left that were killed as they
    started."""
    from ray.experimental import internal_kv

    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            for prefix in _prefixes(name):
                internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=_NAMESPACE)


def _prefixes(name: str) -> tuple[bytes, bytes]:
    """How the keys of a cluster's gateways and groups begin."""
    return f"{name}#".encode(), f"{name}:".encode()
