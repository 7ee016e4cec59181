"""What can go wrong while routing, as far as a caller may handle it.

QuireError
├── NoGroupAvailable   no replica group may take the request; nothing was reserved
└── UnknownDecision    what is asked for was not routed here, or is forgotten
"""

from quire.worker.errors import QuireError


class NoGroupAvailable(QuireError):
    """Every group is gone or excluded. Nothing was reserved."""

    def __init__(self, *, num_groups: int, num_excluded: int) -> None:
        super().__init__(
            f"no replica group can take the request: {num_groups} known, {num_excluded} excluded"
        )
        self.num_groups = num_groups
        self.num_excluded = num_excluded


class UnknownDecision(QuireError):
    """The request was not routed by this process, or its decision is forgotten."""

    def __init__(self, name: str, *, num_kept: int) -> None:
        super().__init__(
            f"request_id={name!r}: no routing decision is known here; the last {num_kept} are "
            "kept, and each gateway knows only its own: ask sooner, or the gateway that served it"
        )
