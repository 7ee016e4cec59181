"""Reads the C ABI that a source declares, for ctypes: its structures, constants and functions.

A source is a header, or a ``.cpp`` file without one, whose function definitions count. Only what
stands within ``extern "C"`` is read, and only the C that ours are written in: enums with a number
for each name; structures of numbers, pointers, arrays, structures and unions without a name;
functions of numbers and pointers. All else is an error, so nothing is passed over.

A pointer to a structure of the header is a ``POINTER`` to it, which keeps what it points to alive.
All others are ``c_void_p``, which take an address and keep nothing.
"""

import ctypes
import re
from ctypes import POINTER, Structure, Union, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NUMBERS: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_DECLARATION = re.compile(
    r"enum \w+ : \w+ \{(?P<values>[^}]*)\};"
    r"|struct (?P<structure>\w+) \{(?P<fields>(?:[^{}]|\{[^{}]*\})*)\};"
    r"|(?P<result>\w+)(?P<star>\*?) (?P<function>\w+)\((?P<parameters>[^)]*)\);"
)
_BODY = re.compile(r"\) \{(?:.*|\n(?:(?: .*)?\n)*)\}$", re.MULTILINE)
_FIELD = re.compile(
    r"union \{(?P<union>[^}]*)\};"
    r"|(?:const )?(?P<type>[\w:]+)(?P<star>\*?) (?P<name>\w+)(?:\[(?P<length>\w+)\])?;"
)
_VALUE = re.compile(r"(\w+) = (\d+),?")
_PARAMETER = re.compile(r"(?:const )?(?P<type>[\w:]+)(?P<star>\*?(?: const\*)?) \w+,?")


@dataclass
class Header:
    """What a source declares, by name; see `read`."""

    structures: dict[str, type[Structure]] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    functions: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict)
    """The type of the result, ``None`` for none, and those of the arguments."""

    def declare(self, library: ctypes.CDLL) -> None:
        """Sets the types of the library's functions."""
        for name, (result, arguments) in self.functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    def type_of(self, name: str, *, is_pointer: bool) -> Any:
        if is_pointer:
            return POINTER(self.structures[name]) if name in self.structures else c_void_p
        return self.structures[name] if name in self.structures else _NUMBERS[name]

    def fields_of(self, text: str) -> dict[str, Any]:
        """The types of a structure's fields, in order; a union without a name is called "any"."""
        found: dict[str, Any] = {}
        for each in _all(_FIELD, text):
            if each["union"]:
                union = tuple(self.fields_of(each["union"]).items())
                found["any"] = type("Any", (Union,), {"_fields_": union})
                continue
            kind = self.type_of(each["type"], is_pointer=bool(each["star"]))
            length = each["length"]
            found[each["name"]] = kind * self.constants[length] if length else kind
        return found


def read(path: Path) -> Header:
    """
    Raises:
        ValueError: It declares something that is not known here; the message quotes it.
        KeyError: It uses a type or a constant that it does not declare before.
    """
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8").split('\n}  // extern "C"\n')[0])
    text = _BODY.sub(");", text.partition('extern "C" {')[2])
    header = Header()
    for each in _all(_DECLARATION, text):
        if name := each["structure"]:
            fields = header.fields_of(each["fields"])
            body = {"_fields_": tuple(fields.items()), "_anonymous_": ("any",) * ("any" in fields)}
            header.structures[name] = type(name, (Structure,), body)
        elif name := each["function"]:
            result = each["result"]
            header.functions[name] = (
                None if result == "void" else header.type_of(result, is_pointer=bool(each["star"])),
                [
                    header.type_of(one["type"], is_pointer=bool(one["star"]))
                    for one in _all(_PARAMETER, each["parameters"])
                ],
            )
        else:
            values = _all(_VALUE, each["values"])
            header.constants.update((value[1], int(value[2])) for value in values)
    return header


def _all(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Matches that follow each other, with nothing but space around them."""
    found: list[re.Match[str]] = []
    text = " ".join(text.split())
    end = 0
    while end < len(text):
        match = pattern.match(text, end)
        if match is None:
            raise ValueError(f"not understood in a header: {text[end : end + 80]!r}")
        found.append(match)
        end = match.end() + (text[match.end() : match.end() + 1] == " ")
    return found
