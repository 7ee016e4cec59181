"""The fields of a ``config.json``: each is checked when it is read. Knows no torch."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.worker.api.errors import CheckpointError

T = TypeVar("T")

_MOST = 1 << 24
"""The greatest count: more positions than models are trained for, more tokens than kernels take."""
_LEAST_FLOAT, _MOST_FLOAT = 1e-30, 1e30
"""The bounds of any number: beyond them float32 has no room for what is computed with it."""


class Fields:
    """A JSON object of the file ``file``. ``null`` means that a field is not there.

    Raises CheckpointError where a field is not what it must be; the message names file, field and
    value.
    """

    def __init__(self, raw: dict[str, Any], file: Path) -> None:
        self.raw = raw
        self.file = file

    def count(self, name: str, *, default: int | None = None) -> int:
        """A count, of 1 or more."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
            raise self.wrong(name, value, f"an integer of 1 or more, at most {_MOST}")
        return value

    def number(self, name: str, *, default: float) -> float:
        """A number above 0."""
        value = self.raw.get(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _LEAST_FLOAT <= value <= _MOST_FLOAT:
            raise self.wrong(name, value, "a finite number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self.wrong(name, value, "true or false")
        return default if value is None else value

    def section(self, name: str) -> "Fields":
        """An object; an empty one where there is none."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value, self.file)

    def names(self, name: str) -> list[str]:
        """A list of names; an empty one where there is none."""
        values = self.raw.get(name) or []
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise self.wrong(name, values, "a list of names")
        return values

    def numbers(self, name: str, *, count: int) -> tuple[float, ...]:
        """``count`` numbers above 0."""
        values = self.raw.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise self.wrong(name, values, f"{count} numbers")
        return tuple(Fields({name: each}, self.file).number(name, default=0.0) for each in values)

    def token_id(self, name: str) -> int | None:
        value = self.raw.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(name, value, "a token id")
        return value

    def choice(self, name: str, choices: Mapping[str, T], *, default: str) -> T:
        """What ``choices`` makes of the field."""
        value = self.raw.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, value, f"; only {', '.join(map(repr, choices))} is")
        return choices[value]

    def refuse(self, *names: str) -> None:
        """Refuses fields that mean something which the family does not say."""
        for name in names:
            if self.raw.get(name) is not None:
                raise self.refused(name, self.raw[name])

    def refused(self, name: str, value: object, instead: str = "") -> CheckpointError:
        """A value that means something which Quire does not run."""
        return CheckpointError(
            f"{self.file}: {name}={reprlib.repr(value)} is not supported{instead}"
        )

    def wrong(self, name: str, value: object, right: str) -> CheckpointError:
        """A value that means nothing."""
        return CheckpointError(f"{self.file}: {name}={reprlib.repr(value)} must be {right}")

    def broken(self, what: str) -> CheckpointError:
        """Fields that do not fit each other."""
        return CheckpointError(f"{self.file}: {what}")
