"""Logs of groups and gateways, written into Ray Serve's log of each replica.

Serve keeps a log for each replica, ``logs/serve/replica_quire_…`` in Ray's session folder, and
writes the same to standard error. It knows its own logger alone: without this, our warnings come
without time or origin, and the rest nowhere.
"""

import logging


def log_beside_serve(*, level: int = logging.INFO) -> None:
    """Has Quire's loggers write where Serve's does. To be called in a Serve replica."""
    ours = logging.getLogger("quire")
    ours.handlers = list(logging.getLogger("ray.serve").handlers)
    ours.propagate = not ours.handlers
    ours.setLevel(level)
