"""Request bodies over HTTP, and which of their fields are served.

A field that changes the answer and is not served is refused by name. So is an unknown field, unless
the gateway is configured to ignore those: an answer that silently lacks a tool call, or ignores a
misspelt setting, is worse than none.
"""

import difflib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from quire.worker.request.errors import InvalidRequest

_MAX_NAME = 64
"""How many characters of an unknown field's name are compared with known names."""
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
"""Values with which an unserved field has no effect."""


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are not served, with the values that are accepted because they have no effect."""
    accepted: ClassVar[frozenset[str]] = frozenset()
    """Fields that change nothing in the answer, whatever their value."""

    unserved: ClassVar[frozenset[str]] = frozenset()
    """Fields that are ignored because the request can be served without them. The answer's header
    X-Ignored-Fields names those whose values ask for something."""

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    remedies: ClassVar[Mapping[str, str]] = {}
    """By field that is not served: advice for the client, other than to leave the field out."""

    parts: ClassVar[Mapping[str, type["Body"]]] = {}
    """Fields that are objects, with the model of their own fields."""

    def check(self) -> None:
        """Raises InvalidRequest if fields contradict each other."""

    def note_ignored(self, given: Mapping[str, object]) -> None:
        """Records the unserved fields in ``given``, the body as received, for the answer's
        header."""
        names = (name for name in given if name in self.unserved)
        self._ignored = tuple(name for name in names if given[name] not in _NOTHING)
        for name, part, fields in self._given_parts(given):
            self._ignored += tuple(f"{name}.{each}" for each in fields if each in part.unserved)

    @property
    def ignored(self) -> Sequence[str]:
        """Parts of the request that do not influence the answer."""
        return self._ignored

    @classmethod
    def check_served(cls, given: Mapping[str, object], *, ignore_unknown: bool = False) -> None:
        """Raises InvalidRequest if ``given``, the body as received, uses a field that is not
        served, or has an unknown field and ``ignore_unknown`` is false."""
        known = _known(cls)
        unknown = next((name for name in given if not ignore_unknown and name not in known), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown[:_MAX_NAME], sorted(known), n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            shown = f"{unknown[:_MAX_NAME]}={reprlib.repr(given[unknown])}"
            raise InvalidRequest(
                f"{shown} is no field of this request: {remedy}", param=unknown[:_MAX_NAME]
            )
        for name, allowed in cls.neutral.items():
            value = given.get(name)
            if value is not None and value not in allowed:
                shown = reprlib.repr(value)
                remedy = cls.remedies.get(name, "leave it out")
                raise InvalidRequest(f"{name}={shown} is not supported: {remedy}", param=name)
        for _, part, fields in cls._given_parts(given):
            part.check_served(fields, ignore_unknown=ignore_unknown)

    @classmethod
    def _given_parts(
        cls, given: Mapping[str, object]
    ) -> Iterator[tuple[str, type["Body"], Mapping[str, object]]]:
        for name, part in cls.parts.items():
            fields = given.get(name)
            if isinstance(fields, dict):
                yield name, part, fields


@cache
def _known(body: type[Body]) -> frozenset[str]:
    return frozenset(body.model_fields) | body.neutral.keys() | body.accepted | body.unserved
