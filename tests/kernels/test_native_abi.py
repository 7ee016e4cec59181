"""The structs and constants read from the library's header, against a C++ compiler's."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import native_header
from quire.kernels.native import abi as native_abi

SOURCES = Path(native_abi.__file__).parent
NAMES: dict[Any, str] = {
    None: "void",
    ctypes.c_void_p: "Anything",
    ctypes.c_float: "float",
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
}


def facts() -> Iterator[str]:
    """Sizes, offsets, types and constants as C++ expressions that must be true."""
    header = native_abi.HEADER
    for name, number in header.constants.items():
        yield f"{name} == {number}"
    for name, structure in header.structures.items():
        yield f"sizeof({name}) == {ctypes.sizeof(structure)}"
        yield from facts_of_fields(name, structure)
    for name, (result, arguments) in header.functions.items():
        kinds = "".join(f", {name_of(kind)}" for kind in arguments)
        yield f"std::is_same_v<std::invoke_result_t<decltype({name})*{kinds}>, {name_of(result)}>"


def facts_of_fields(name: str, structure: type[ctypes.Structure]) -> Iterator[str]:
    for field, kind, *_ in structure._fields_:
        if field == "any":
            fields: list[tuple[str, type[ctypes.Structure]]] = list(kind._fields_)  # type: ignore
            for member, each in fields:
                yield f"offsetof({name}, {member}) == {getattr(structure, member).offset}"
                yield f"std::is_same_v<decltype({name}::{member}), {each.__name__}>"
            continue
        yield f"offsetof({name}, {field}) == {getattr(structure, field).offset}"
        yield f"sizeof({name}::{field}) == {ctypes.sizeof(kind)}"
        if kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer):
            yield f"std::is_convertible_v<decltype({name}::{field}), const {name_of(kind)}>"
        elif kind in NAMES:
            yield f"std::is_same_v<decltype({name}::{field}), {name_of(kind)}>"


def name_of(kind: Any) -> str:
    if kind in NAMES:
        return NAMES[kind]
    return f"{kind._type_.__name__}*" if issubclass(kind, ctypes._Pointer) else str(kind.__name__)


@pytest.mark.slow
def test_the_compiler_sees_what_python_reads() -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = ["#include <cstddef>", "#include <type_traits>", '#include "quire.h"']
    lines += ["struct Anything { Anything(const void*); template <class T> operator T*() const; };"]
    lines += [f"static_assert({fact});" for fact in facts()]
    assert len(lines) > 500
    command = [compiler, "-std=c++17", "-fsyntax-only", "-x", "c++", f"-I{SOURCES}", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("declaration", "error", "message"),
    [
        ("struct Odd { int32_t bits : 3; };", ValueError, r"not understood.*bits : 3"),
        ("struct Odd { double x; };", KeyError, "double"),
        ("struct Odd { int32_t x[MANY]; };", KeyError, "MANY"),
        ("enum Odd : int32_t { FIRST };", ValueError, "FIRST"),
        ("int32_t odd(Unknown by_value);", KeyError, "Unknown"),
        ("using Odd = int32_t;", ValueError, "using Odd"),
    ],
)
def test_a_header_beyond_the_reader_is_refused(
    declaration: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    header = tmp_path / "odd.h"
    header.write_text(f'extern "C" {{\n{declaration}\n}}  // extern "C"\n')
    with pytest.raises(error, match=message):
        native_header.read(header)


def test_what_is_outside_extern_c_does_not_count(tmp_path: Path) -> None:
    header = tmp_path / "small.h"
    header.write_text(
        "namespace a { class B; }\n"
        'extern "C" {\nenum E : int32_t { ONE = 1 };\n}  // extern "C"\nvoid other(int&);\n'
    )
    assert native_header.read(header) == native_header.Header(constants={"ONE": 1})


def test_what_a_source_defines_is_declared(tmp_path: Path) -> None:
    source = tmp_path / "small.cpp"
    source.write_text(
        'extern "C" {\n\nA* new_a() { return new A; }\n\n// Why.\n'
        "void fill(A* a, uint32_t n) {\n  for (; n;) {\n\n    a->add(n--);\n  }\n}\n"
        'int32_t get(const A* a) { return a->n; }\n}  // extern "C"\n'
    )
    assert native_header.read(source).functions == {
        "new_a": (ctypes.c_void_p, []),
        "fill": (None, [ctypes.c_void_p, ctypes.c_uint32]),
        "get": (ctypes.c_int32, [ctypes.c_void_p]),
    }
