"""What can go wrong while routing, as far as a caller may handle it.

QuireError
└── NoGroupAvailable   no replica group may take the request; nothing was reserved
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
