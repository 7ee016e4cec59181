"""Reads the fields of a ``config.json`` and checks each. Does not import torch."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.worker.request.errors import CheckpointError

T = TypeVar("T")

_MOST = 1 << 24
"""The largest count that is accepted, above every real model's positions and tokens."""
_LEAST_FLOAT, _MOST_FLOAT = 1e-30, 1e30
"""Bounds of every number: beyond them, computing with it would overflow float32."""


class Fields:
    """A JSON object in the file ``file``. A field that is ``null`` counts as missing.

    Raises CheckpointError if a field has a wrong type or value; the message names file, field and
    value.
    """

    def __init__(self, raw: dict[str, Any], file: Path) -> None:
        self.raw = raw
        self.file = file

    def count(self, name: str, *, default: int | None = None) -> int:
        """An integer of 1 or more."""
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
        """A nested object; empty if the field is missing."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(value, self.file)

    def names(self, name: str) -> list[str]:
        """A list of names; empty if the field is missing."""
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
        """The value to which ``choices`` maps the field."""
        value = self.raw.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refused(name, value, f"; only {', '.join(map(repr, choices))} is")
        return choices[value]

    def refuse(self, *names: str) -> None:
        """Raises CheckpointError if one of these fields is set: the family does not support it."""
        for name in names:
            if self.raw.get(name) is not None:
                raise self.refused(name, self.raw[name])

    def only(self, *names: str) -> None:
        """Raises CheckpointError if another field is set: it may change results."""
        self.refuse(*(name for name in self.raw if name not in names))

    def refused(self, name: str, value: object, instead: str = "") -> CheckpointError:
        """The error for a valid value that Quire does not support."""
        return CheckpointError(
            f"{self.file}: {name}={reprlib.repr(value)} is not supported{instead}"
        )

    def wrong(self, name: str, value: object, right: str) -> CheckpointError:
        """The error for an invalid value."""
        return CheckpointError(f"{self.file}: {name}={reprlib.repr(value)} must be {right}")

    def broken(self, what: str) -> CheckpointError:
        """The error for fields that contradict each other."""
        return CheckpointError(f"{self.file}: {what}")
