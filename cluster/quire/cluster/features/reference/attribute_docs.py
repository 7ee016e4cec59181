"""Reads annotations and docstrings of attributes from a class's source, for reference pages."""

import ast
import inspect
import textwrap
from typing import NamedTuple


class Attribute(NamedTuple):
    annotation: str
    """The annotation as the source has it."""
    text: str
    """The docstring below the attribute, as one paragraph; empty if there is none."""


def attributes_of(owner: type) -> dict[str, Attribute]:
    """The annotated attributes that ``owner`` itself declares, by name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, Attribute] = {}
    name = ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            found[name] = Attribute(ast.unparse(node.annotation), "")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            text = " ".join(inspect.cleandoc(str(node.value.value)).split())
            found[name] = found[name]._replace(text=text)
    return found
