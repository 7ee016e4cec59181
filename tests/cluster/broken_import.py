"""A module whose own import fails, for `test_private.py`."""

import nothing_of_this_name  # type: ignore[import-not-found]  # noqa: F401
