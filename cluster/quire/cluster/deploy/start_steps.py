"""Reports the steps of each starting replica to the process that waits for it.

Replicas may run on any node, and Serve reports nothing about starting ones. So each writes its
steps to its own key in Ray's key-value store, until it has started or failed.
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
"""The steps of one start, each with its begin on the wall clock."""


class StartSteps:
    """Reports and logs the steps of this process's replica ``replica`` of the application ``app``
    while the block runs."""

    def __init__(self, app: str, replica: str) -> None:
        self._key = f"{app}#{replica}".encode()
        self._steps: Steps = []

    def begin(self, name: str) -> None:
        """Notes that the step ``name`` begins and the last one has ended."""
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

        if not ray.is_initialized():  # The call would start a Ray cluster.
            return
        try:
            if value is None:
                internal_kv._internal_kv_del(self._key, namespace=_NAMESPACE)
            else:
                internal_kv._internal_kv_put(self._key, value, namespace=_NAMESPACE)
        except Exception as error:  # Ray raises many kinds. A start must not fail by its report.
            _log.debug("the start's steps cannot be told: %r", error)


def steps_of(name: str) -> dict[str, Steps]:
    """The steps of each replica of the cluster ``name`` that starts now, by replica id."""
    from ray.experimental import internal_kv

    found: dict[str, Steps] = {}
    with contextlib.suppress(Exception):  # Ray raises many kinds, and the steps are optional.
        for prefix in _prefixes(name):
            for key in internal_kv._internal_kv_list(prefix, namespace=_NAMESPACE):
                value = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
                if value is not None:
                    replica = key.decode().partition("#")[2]
                    found[replica] = [(step, float(began_s)) for step, began_s in json.loads(value)]
    return found


@contextlib.contextmanager
def forgotten_at_end(name: str) -> Iterator[None]:
    """Removes, after the block, the steps of replicas of the cluster ``name`` that were killed
    during their start."""
    from ray.experimental import internal_kv

    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            for prefix in _prefixes(name):
                internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=_NAMESPACE)


def _prefixes(name: str) -> tuple[bytes, bytes]:
    """The prefixes of the keys of a cluster's gateways and groups."""
    return f"{name}#".encode(), f"{name}:".encode()
