"""Generates the page of the gRPC API, from the ``.proto`` files and their comments."""

import re
from pathlib import Path
from typing import NamedTuple

from tools.reference.markdown import code, table

_PROTO = Path(__file__).resolve().parents[2] / "proto/quire/v1"
_FILES = ("inference.proto", "admin.proto")
"""The files that clients and operators use; `group.proto` is between gateways and groups."""
_RPC = re.compile(r"rpc (\w+)\((?:(stream) )?(\w+)\) returns \((?:(stream) )?(\w+)\)")
_FIELD = re.compile(r"(?:(repeated|optional) )?([\w.]+|map<[^>]+>) (\w+) = \d+.*;")
_ENUM_VALUE = re.compile(r"([A-Z_0-9]+) = \d+;")


class _Block(NamedTuple):
    kind: str
    """service, message or enum."""
    name: str
    comment: str
    rows: list[tuple[str, str, str]]
    """Name, type and comment of each member."""


def page() -> str:
    parts = []
    for file in _FILES:
        for block in _blocks((_PROTO / file).read_text()):
            title = f"## {block.kind.capitalize()} `{block.name}`\n"
            said = f"{block.comment}\n\n" if block.comment else ""
            header = (
                ("call", "types", "meaning")
                if block.kind == "service"
                else ("field", "type", "meaning")
            )
            parts.append(f"{title}{said}{table(header, block.rows) if block.rows else ''}\n")
    return "".join(parts)


def _blocks(text: str) -> list[_Block]:
    """The services, messages and enums of a file; nested ones follow their parent."""
    done: list[_Block] = []
    around: list[_Block | None] = []
    comment: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            comment.append(line.lstrip("/ "))
            continue
        said, behind = " ".join(comment), line.partition("//")[2].strip()
        comment = []
        opened = re.match(r"(service|message|enum|oneof) (\w+) {", line)
        block = next((each for each in reversed(around) if each), None)
        if opened and opened[1] != "oneof":
            names = [each.name for each in around if each] + [opened[2]]
            made = _Block(opened[1], ".".join(names), said, [])
            done.append(made)
            if not line.endswith("}"):
                around.append(made)
        elif opened:
            around.append(None)
        elif line.startswith("}"):
            if around:
                around.pop()
        elif block:
            _add(block, line, f"{said} {behind}".strip())
    return done


def _add(block: _Block, line: str, said: str) -> None:
    if call := _RPC.match(line):
        name, *_ = call.groups()
        asked, answered = (
            f"{'stream of ' if s else ''}`{t}`"
            for s, t in zip(call.groups()[1::2], call.groups()[2::2], strict=True)
        )
        block.rows.append((code(name), f"{asked} → {answered}", said))
    elif field := _FIELD.match(line):
        rule, kind, name = field.groups()
        block.rows.append((code(name), f"{rule or ''} `{kind}`".strip(), said))
    elif block.kind == "enum" and (value := _ENUM_VALUE.match(line)):
        block.rows.append((code(value[1]), "", said))
