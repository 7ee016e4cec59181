"""Fields of a body that ask for structured output, in the forms of OpenAI, vLLM and SGLang."""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from quire.worker.request.errors import InvalidRequest
from quire.worker.request.structured import (
    Constraint,
    StructuredOutputsParams,
    json_constraint,
    structural_constraint,
)


@contextmanager
def told_of(given: Mapping[str, Any]) -> Iterator[None]:
    """Makes errors about a constraint name the field that asked for it."""
    try:
        yield
    except InvalidRequest as error:
        asked = [name for name, value in given.items() if value is not None]
        if error.param != "structured_outputs" or not asked:
            raise
        raise error.renamed(asked[-1]) from None


def constraint_of(given: Mapping[str, Any]) -> Constraint | None:
    """The constraint that ``given`` asks for; ``None`` if it asks for none. ``given``: the fields
    named in `FIELDS`; they may be absent or ``None``.

    Raises:
        InvalidRequest: Two fields ask for a constraint, or one is not supported.
    """
    asked = {
        name: constraint
        for name, value in given.items()
        if value is not None and (constraint := FIELDS[name](value)) is not None
    }
    if len(asked) > 1:
        raise InvalidRequest(
            f"{' and '.join(asked)} are both given: one form of output at a time",
            param=next(iter(asked)),
        )
    return next(iter(asked.values()), None)


def _with_schema_beside(name: str) -> Callable[[Any], Constraint | None]:
    """A parser of a field that has the schema beside its type."""
    return lambda value: _of_response_format(
        {**value, "json_schema": value}, name=name, shown=value
    )


def _of_response_format(
    value: Mapping[str, Any],
    *,
    name: str = "response_format",
    shown: Mapping[str, Any] | None = None,
) -> Constraint | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # SGLang and older servers accept a schema beside the type.
        return json_constraint(value["schema"]) if value.get("schema") else json_constraint()
    if kind == "structural_tag":
        return structural_constraint({name: each for name, each in value.items() if name != "type"})
    if kind != "json_schema":
        raise InvalidRequest(
            f"{name}={reprlib.repr(dict(shown or value))}: its type must be text, json_object, "
            "json_schema or structural_tag",
            param=name,
        )
    form = value.get("json_schema")
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(
            f"{name}={reprlib.repr(dict(shown or value))}: json_schema must be an object with a "
            "JSON schema as its schema",
            param=name,
        )
    return json_constraint(schema)


def _of_structured_outputs(value: Mapping[str, Any]) -> Constraint:
    known = {field.name for field in fields(StructuredOutputsParams)}
    for name, entry in value.items():
        if name not in known and entry not in (None, False):
            raise InvalidRequest(
                f"structured_outputs={reprlib.repr(dict(value))}: {name} is not supported: leave "
                "it out",
                param="structured_outputs",
            )
    return StructuredOutputsParams(**{k: v for k, v in value.items() if k in known}).constraint


def _as(name: str) -> Callable[[Any], Constraint]:
    return lambda value: StructuredOutputsParams(**{name: value}).constraint


FIELDS: Mapping[str, Callable[[Any], Constraint | None]] = {
    "text.format": _with_schema_beside("text.format"),
    "output_config.format": _with_schema_beside("output_config.format"),
    "response_format": _of_response_format,
    # vLLM's, followed by their older names.
    "structured_outputs": _of_structured_outputs,
    "guided_json": _as("json"),
    "guided_regex": _as("regex"),
    "guided_choice": _as("choice"),
    "guided_grammar": _as("grammar"),
    # SGLang's.
    "structural_tag": _as("structural_tag"),
    "json_schema": _as("json"),
    "regex": _as("regex"),
    "ebnf": _as("grammar"),
}
"""The function that turns each field's value into a constraint."""
