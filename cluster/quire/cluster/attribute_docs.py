"""What the docstrings below a class's attributes say, for references that are made of the code."""

import ast
import inspect
import textwrap


def attribute_docs(declared: type) -> dict[str, str]:
    """The text below each attribute that has one, as one line with CommonMark's marks for code."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(declared))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _string(following)
            if text is not None:
                docs[statement.target.id] = " ".join(text.split()).replace("``", "`")
    return docs


def _string(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else None
    return None
