"""Errors of routing that a caller may handle.

QuireError
├── NoGroupAvailable   no replica group may take the request; nothing was reserved
└── UnknownDecision    the request was not routed here, or its decision was dropped from the log
"""

from quire.worker.request.errors import QuireError


class NoGroupAvailable(QuireError):
    """Every replica group is gone or excluded. Nothing was reserved."""

    def __init__(self, *, num_groups: int) -> None:
        super().__init__(
            f"no replica group can take the request: {num_groups} known, {num_groups} excluded"
        )


class UnknownDecision(QuireError):
    """The request was not routed here, or its decision was dropped from the log. ``incomplete``:
    names gateways that may know it but did not answer."""

    def __init__(self, name: str, *, incomplete: str = "") -> None:
        super().__init__(
            f"request_id={name!r}: no routing decision is known here; only the last ones are kept: "
            f"ask sooner{incomplete and f', or again, since {incomplete}'}"
        )
