"""What the fields of a dataclass are for: the text below each one, as its source has it."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NamedTuple


class DocumentedField(NamedTuple):
    name: str
    annotation: str
    """Its type, as written."""
    default: Any
    """`dataclasses.MISSING` where it must be given."""
    description: str
    """One paragraph; empty where the source has none."""


@cache
def documented_fields(owner: type) -> dict[str, DocumentedField]:
    """The fields of a dataclass, its bases' first, by name."""
    texts: dict[str, tuple[str, str]] = {}
    for base in reversed(owner.__mro__[:-1]):
        texts |= _texts(base)
    found = {}
    for field in fields(owner):
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        annotation, description = texts[field.name]
        found[field.name] = DocumentedField(field.name, annotation, default, description)
    return found


def _texts(owner: type) -> dict[str, tuple[str, str]]:
    """The annotation and the description of each field that a class itself declares."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = (ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            text = " ".join(inspect.cleandoc(str(node.value.value)).split())
            found[name] = (found[name][0], text)
    return found
