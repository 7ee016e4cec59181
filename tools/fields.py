"""Reads the docstrings below the fields of a dataclass from its source."""

from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple

from quire.worker.request.settings import Attribute, attributes_of


class DocumentedField(NamedTuple):
    name: str
    annotation: str
    """The field's type, as written in the source."""
    default: Any
    """The default; `dataclasses.MISSING` if the field is required."""
    description: str
    """The docstring as one paragraph; empty if there is none."""


@cache
def documented_fields(owner: type) -> dict[str, DocumentedField]:
    """The fields of a dataclass, its bases' first, by name."""
    texts: dict[str, Attribute] = {}
    for base in reversed(owner.__mro__[:-1]):
        texts |= attributes_of(base)
    found = {}
    for field in fields(owner):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        annotation, description = texts[field.name]
        found[field.name] = DocumentedField(field.name, annotation, default, description)
    return found
