"""A checkpoint's response template: its own description of how to parse its answers.

transformers (5.13 and later) stores it in ``tokenizer_config.json``. It lists the fields of a
message, each of which is a region of the text between two delimiters. The full description:
https://huggingface.co/docs/transformers/main/chat_response_parsing

The file comes with the checkpoint, so nothing in it is trusted. Its size is bounded, and its
regular expressions are never run: each is parsed as a sequence of texts, whitespace and named
groups, or refused.
"""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.worker.request.errors import UnreadableTemplate

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field for reasoning in templates."""
_MAX_CHARS = 32_768
_MAX_PATTERN_CHARS = 512
_MAX_TEXT_CHARS = 128
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args"} | {
    *("repeats", "join", "optional", "transform", "transform_each"),
}
_ATOM = re.compile(
    r"""
      (?P<gap> (?: \\[snrt] | [ ] ) [*+?]\?? )
    | \(\?P<(?P<group>[A-Za-z_]\w*)> (?P<body> (?: \[(?:\\.|[^\]\\])+\] | \\[A-Za-z] | \. )
                                               [*+]\?? ) \)
    | \\(?P<escaped>[^\w\s]) (?![*+?{])
    | \\(?P<control>[nrt]) (?![*+?{])
    | (?P<plain>[^\\.^$*+?{}\[\]|()]) (?![*+?{])
    """,
    re.VERBOSE,
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class Gap:
    """Any amount of whitespace."""


@dataclass(frozen=True)
class Group:
    """A named group of a regular expression."""

    name: str
    pattern: str


Sequence = tuple[str | Gap | Group, ...]
"""The parts of a delimiter. Two texts, or two gaps, are never adjacent."""


@dataclass(frozen=True)
class Field:
    """A field of the message."""

    name: str
    given: Mapping[str, Any]

    @property
    def is_marked(self) -> bool:
        """Whether it has an opening delimiter; if not, it is the text that no other field takes."""
        return "open" in self.given or "open_pattern" in self.given

    @property
    def content(self) -> str:
        """The name of the parser of the text between the delimiters."""
        return str(self.given.get("content", "text"))

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the parser ``content``."""
        given = self.given.get("content_args") or {}
        if not isinstance(given, dict):
            raise self.refused("content_args", given)
        return given

    def delimiters(self, side: Literal["open", "close"]) -> tuple[Sequence, ...]:
        """The alternative delimiters that open or close it; none if it extends to the end."""
        pattern = self.given.get(f"{side}_pattern")
        if pattern is not None:
            return (sequence_of(pattern, place=f"{self.name}.{side}_pattern"),)
        given = self.given.get(side, [])
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.refused(side, given)
        if any(not text.strip() or len(text) > _MAX_TEXT_CHARS for text in texts):
            raise self.refused(side, given)
        return tuple((text,) for text in texts)

    def delimiter(self, side: Literal["open", "close"]) -> Sequence:
        """The only opening or closing delimiter. Raises UnreadableTemplate if there are others."""
        given = self.delimiters(side)
        if len(given) != 1:
            raise self.refused(side, self.given.get(side))
        return given[0]

    def refused(self, key: str, value: object) -> UnreadableTemplate:
        return refused(f"{self.name}.{key}", value)


def refused(place: str, value: object) -> UnreadableTemplate:
    shown = place.encode("unicode_escape").decode()[:_MAX_TEXT_CHARS]
    return UnreadableTemplate(f"{shown}={reprlib.repr(value)} cannot be expressed")


def fields_of(template: object) -> dict[str, Field]:
    """The fields of a response template, by name.

    Raises:
        UnreadableTemplate: It does not have transformers' structure, or is too large.
    """
    if not isinstance(template, dict):
        raise UnreadableTemplate(f"it must be an object, not {reprlib.repr(template)}")
    try:
        num_chars = len(json.dumps(template))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnreadableTemplate("it is not JSON, or nested too deeply") from error
    if num_chars > _MAX_CHARS:
        raise UnreadableTemplate(f"it has {num_chars} characters: at most {_MAX_CHARS}")
    if template.get("version", 1) != 1:
        raise refused("version", template["version"])
    if unknown := sorted(template.keys() - _KEYS):
        raise refused(unknown[0], template[unknown[0]])
    given = template.get("fields")
    if not isinstance(given, dict) or not given:
        raise refused("fields", given)
    for name, field in given.items():
        if not isinstance(field, dict):
            raise refused(name, field)
        if unknown := sorted(field.keys() - _FIELD_KEYS):
            raise refused(f"{name}.{unknown[0]}", field[unknown[0]])
    return {name: Field(name, field) for name, field in given.items()}


def check_rest(fields: Mapping[str, Field]) -> None:
    """Raises UnreadableTemplate if an answer has fields other than reasoning, calls and the
    remaining text."""
    for name, field in fields.items():
        if name == "content":
            if field.is_marked:
                raise UnreadableTemplate("content is marked too, and not only what is left")
            if field.content != "text":
                raise field.refused("content", field.content)
        elif name not in REASONING_FIELDS and name != "tool_calls":
            raise UnreadableTemplate(f"the field {reprlib.repr(name)} is not known")


def sequence_of(pattern: object, *, place: str) -> Sequence:
    """The parts of a regular expression. Raises UnreadableTemplate if it has unsupported parts."""
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN_CHARS:
        raise refused(place, pattern)
    parts: list[str | Gap | Group] = []
    at = 0
    while at < len(pattern):
        found = _ATOM.match(pattern, at)
        if found is None:
            raise UnreadableTemplate(
                f"{place}={reprlib.repr(pattern)} cannot be expressed: "
                f"{reprlib.repr(pattern[at:])} is more than texts, whitespace and named groups"
            )
        at = found.end()
        if found["gap"]:
            if not parts or not isinstance(parts[-1], Gap):
                parts.append(Gap())
        elif found["group"]:
            parts.append(Group(found["group"], found["body"]))
        else:
            text = found["escaped"] or found["plain"] or _CONTROL[found["control"]]
            if parts and isinstance(parts[-1], str):
                text = str(parts.pop()) + text
            parts.append(text)
    if any(isinstance(part, str) and len(part) > _MAX_TEXT_CHARS for part in parts):
        raise refused(place, pattern)
    if not parts:
        raise refused(place, pattern)
    return tuple(parts)


def text_of(sequence: Sequence) -> str | None:
    """The text of a sequence that has only one, without surrounding whitespace; else ``None``."""
    texts = [part.strip() for part in sequence if isinstance(part, str) and part.strip()]
    if len(texts) != 1 or any(isinstance(part, Group) for part in sequence):
        return None
    return texts[0]
