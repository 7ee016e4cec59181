"""Structured outputs: the constraint that a request's output must satisfy.

    Constraint                part of a request: one of four kinds, and its text
    StructuredOutputsParams   vLLM's form of it; its `constraint` is a `Constraint`

`quire.worker.text.grammar.compiler` interprets constraints and refuses unsupported ones. This
module does not import it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from quire.worker.request.arguments import explains_arguments
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.vllm_names import STRUCTURED

ConstraintKind = Literal["json_schema", "regex", "grammar", "structural_tag"]
MAX_CONSTRAINT_BYTES = 2**19
"""The longest constraint, in UTF-8."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on an output.

    Raises:
        InvalidRequest: The kind is unknown, or the text is too long, empty or not a string.
    """

    kind: ConstraintKind
    text: str
    """A JSON schema as JSON; or a regular expression that the whole output matches, in the syntax
    of Rust's ``regex`` with ASCII digits and letters; or a context-free grammar, in Lark's
    syntax with llguidance's extensions or in llama.cpp's (``root ::= …``); or a structural tag as
    JSON, with ``structures`` and ``triggers`` or with ``format``."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            known = ", ".join(get_args(ConstraintKind))
            raise InvalidRequest(
                f"structured_outputs: kind={self.kind!r} is not one of {known}",
                param="structured_outputs",
            )
        if not isinstance(self.text, str) or not self.text:
            raise InvalidRequest(
                f"structured_outputs={self.kind} is empty, or is not a text",
                param="structured_outputs",
            )
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"structured_outputs={self.kind} is not valid Unicode: {error.reason}",
                param="structured_outputs",
            ) from None
        if num_bytes > MAX_CONSTRAINT_BYTES:
            raise InvalidRequest(
                f"structured_outputs={self.kind} has {num_bytes} bytes: at most "
                f"{MAX_CONSTRAINT_BYTES}",
                param="structured_outputs",
            )


@explains_arguments(STRUCTURED)
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StructuredOutputsParams:
    """A constraint on an output, with vLLM's field names. Exactly one field must be set.

    Raises:
        InvalidRequest: No field or more than one is set, or a value is invalid.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression that the whole output must match."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """See `Constraint.text`."""
    json_object: bool | None = None
    """``True``: the output is any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """See `Constraint.text`."""

    def __post_init__(self) -> None:
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        given = [name for name, value in named.items() if value not in (None, False)]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs has {', '.join(given) or 'nothing'}: give exactly one of "
                f"{', '.join(named)}",
                param="structured_outputs",
            )
        self._made()  # A wrong value raises here.

    @property
    def constraint(self) -> Constraint:
        return self._made()

    def _made(self) -> Constraint:
        if self.json is not None:
            return json_constraint(self.json)
        if self.choice is not None:
            return choice_constraint(self.choice)
        if self.structural_tag is not None:
            return structural_constraint(self.structural_tag)
        if self.regex is not None:
            return Constraint("regex", self.regex)
        return Constraint("grammar", self.grammar) if self.grammar else json_constraint(_ANY_OBJECT)


def json_constraint(schema: str | Mapping[str, Any] = _ANY_OBJECT) -> Constraint:
    """Constrains the output to JSON that matches ``schema``; by default, to any object.

    The properties of an object must be in the schema's order.

    Raises:
        InvalidRequest: The schema is not JSON.
    """
    return Constraint("json_schema", _as_json(schema, name="json", what="JSON schema"))


def structural_constraint(tag: str | Mapping[str, Any]) -> Constraint:
    """Constrains the output by a structural tag. Raises InvalidRequest if it is not JSON."""
    text = _as_json(tag, name="structural_tag", what="structural tag")
    return Constraint("structural_tag", text)


def _as_json(given: str | Mapping[str, Any], *, name: str, what: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"structured_outputs={name}: a {what} is an object, not {type(given).__name__}",
            param="structured_outputs",
        )
    try:
        return json.dumps(given, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"structured_outputs={name}: the {what} cannot be written as JSON: {error}",
            param="structured_outputs",
        ) from None


def choice_constraint(choice: Sequence[str]) -> Constraint:
    """Constrains the output to one of these texts.

    Raises:
        InvalidRequest: There is no text, or one is empty or not a string.
    """
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str | bytes)
    if not is_list or not choice or not all(isinstance(each, str) and each for each in choice):
        raise InvalidRequest(
            "structured_outputs=choice must be a list of texts, none empty",
            param="structured_outputs",
        )
    # One terminal: as alternatives of a rule, each text would be a separate parser item at the
    # first token.
    return Constraint("grammar", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choice)))
