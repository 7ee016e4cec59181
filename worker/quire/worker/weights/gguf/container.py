"""Reads the header of a GGUF file: its metadata and the offsets of tensors. Does not import torch.

The file is untrusted: nothing is read beyond its end or `_MAX_HEADER_BYTES`, and memory is bounded
by the header's length. The reader of the package ``gguf`` is not used, because it makes several
arrays of each string and number: seconds for 49,152 tokens, gigabytes for a hostile file.
"""

import mmap
import re
import reprlib
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from quire.worker.request.errors import CheckpointError

SUFFIX = ".gguf"

_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors' headers too; a vocabulary of 262,144 tokens takes 16 million."""
_MAX_DIMENSIONS = 4
_MAX_ENTRIES = 1 << 17
"""The largest number of metadata fields, or of tensors: models have thousands."""
_VERSIONS = (2, 3)
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""The metadata types that are numbers, with their `struct` format."""
_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_GET_AGAIN = "it is truncated or damaged: get it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Strings:
    """An array of strings, decoded on demand."""

    file: Path
    offset: int
    count: int

    def read(self) -> list[str]:
        """Raises CheckpointError: they are not UTF-8."""
        with mapped(self.file) as data:
            cursor = _Cursor(self.file, data, self.offset)
            return [cursor.string() for _ in range(self.count)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor's place in a file, and GGUF's number of its type."""

    file: Path
    name: str
    type: int
    shape: tuple[int, ...]
    """The shape in PyTorch's order: GGUF has the innermost dimension first."""
    offset: int
    """Bytes from the file's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The header of one file, or of a model's first file with the tensors of all its files."""

    file: Path
    metadata: Mapping[str, Any]
    """Numbers, strings, arrays of numbers and `Strings`."""
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """The model's architecture. Raises CheckpointError: the file does not name it."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise CheckpointError(
                f"{self.file}: metadata general.architecture={reprlib.repr(value)} must name the "
                "model's architecture: convert the model again"
            )
        return value


def find_gguf(model: Path) -> Path | None:
    """The GGUF file at ``model``: itself, or the only one in a folder without safetensors files.
    ``None`` if there is none.

    Raises:
        CheckpointError: There are several, or it is a part of a split file but not the first.
    """
    if model.suffix == SUFFIX and model.is_file():
        part = _PART.fullmatch(model.name)
        if part and int(part[2]) != 1:
            raise CheckpointError(
                f"{model}: a part of a file in {int(part[3])} parts: name the first, "
                f"{part[1]}-00001-of-{part[3]}{SUFFIX}"
            )
        return model
    if not model.is_dir() or any(model.glob("model*.safetensors*")):
        return None
    return choose(model, [file.name for file in model.glob(f"*{SUFFIX}")])


def choose(folder: Path, names: list[str]) -> Path | None:
    """The only model among the GGUF files ``names`` of a folder, local or on the hub. Projectors of
    images do not count. Of a split file, the first part is returned.

    Raises:
        CheckpointError: There are several.
    """
    models = []
    for name in sorted(names):
        part = _PART.fullmatch(name)
        is_later = part is not None and int(part[2]) != 1
        if not is_later and not Path(name).name.startswith("mmproj"):
            models.append(name)
    if len(models) > 1:
        raise CheckpointError(
            f"{folder}: has {len(models)} GGUF files, {', '.join(models)}: name one, such as "
            f"{folder / models[0]}"
        )
    return folder / models[0] if models else None


def parts_of(file: Path) -> tuple[Path, ...]:
    """All files of a model whose first part is ``file``.

    Raises:
        CheckpointError: Some are missing.
    """
    part = _PART.fullmatch(file.name)
    if part is None:
        return (file,)
    count = int(part[3])
    files = [file.with_name(f"{part[1]}-{n:05}-of-{part[3]}{SUFFIX}") for n in range(1, count + 1)]
    missing = [each.name for each in files if not each.is_file()]
    if missing:
        raise CheckpointError(
            f"{file}: the first of {count} files, {len(missing)} of them missing: "
            f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )
    return tuple(files)


def read_model(file: Path) -> Header:
    """The header of a model whose first or only file is ``file``.

    Raises:
        CheckpointError: A part is missing, cannot be read, or is damaged.
    """
    first, *others = map(read_header, parts_of(file))
    tensors = dict(first.tensors)
    for other in others:
        if twice := tensors.keys() & other.tensors.keys():
            raise CheckpointError(
                f"{other.file}: tensor {min(twice)!r} is in another part too; {_GET_AGAIN}"
            )
        tensors.update(other.tensors)
    return replace(first, tensors=tensors)


def read_header(file: Path) -> Header:
    """The header of one file. The last few headers are cached.

    Raises:
        CheckpointError: The file cannot be read, or is damaged.
    """
    try:
        stat = file.stat()
        return _read_header(file, (stat.st_size, stat.st_mtime_ns, stat.st_ino))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


@lru_cache(maxsize=64)
def _read_header(file: Path, stamp: tuple[int, ...]) -> Header:
    if not stamp[0]:
        raise CheckpointError(f"{file}: empty: get it again")
    with mapped(file) as data:
        if data[:4] != b"GGUF":
            raise CheckpointError(
                f"{file}: no GGUF file: it begins with {data[:4]!r}; {_GET_AGAIN}"
            )
        cursor = _Cursor(file, data, 4)
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{file}: GGUF of version {version}; read are {', '.join(map(str, _VERSIONS))} in "
                "little-endian order: convert the model again"
            )
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        if max(num_tensors, num_fields) > _MAX_ENTRIES:
            raise CheckpointError(
                f"{file}: {num_tensors} tensors and {num_fields} fields, more than {_MAX_ENTRIES}; "
                f"{_GET_AGAIN}"
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = cursor.string()
            if key in metadata:
                raise CheckpointError(f"{file}: metadata {key!r} is there twice; {_GET_AGAIN}")
            metadata[key] = cursor.value(cursor.number("I"))
        tensors = {}
        for tensor in _tensors(cursor, num_tensors):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{file}: tensor {tensor.name!r} is there twice; {_GET_AGAIN}"
                )
            tensors[tensor.name] = tensor
        start = _aligned(file, cursor.at, metadata.get("general.alignment", 32))
    moved = {name: replace(each, offset=start + each.offset) for name, each in tensors.items()}
    return Header(file=file, metadata=metadata, tensors=moved)


def _tensors(cursor: "_Cursor", count: int) -> Iterator[StoredTensor]:
    """The tensors, with offsets relative to the first one."""
    for _ in range(count):
        name, num_dimensions = cursor.string(), cursor.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(
                f"{cursor.file}: tensor {name!r} has {num_dimensions} dimensions; {_GET_AGAIN}"
            )
        shape = tuple(reversed(cursor.numbers("Q", num_dimensions)))
        kind, offset = cursor.number("I"), cursor.number("Q")
        yield StoredTensor(file=cursor.file, name=name, type=kind, shape=shape, offset=offset)


def _aligned(file: Path, offset: int, alignment: object) -> int:
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise CheckpointError(f"{file}: metadata general.alignment={alignment!r}; {_GET_AGAIN}")
    return -(-offset // alignment) * alignment


class _Cursor:
    """Reads values in sequence."""

    def __init__(self, file: Path, data: mmap.mmap, at: int) -> None:
        self.file = file
        self.at = at
        self._data = data
        self._end = min(len(data), _MAX_HEADER_BYTES)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(
            f"<{kind}", self._data, self._step(struct.calcsize(f"<{kind}"))
        )
        return value

    def numbers(self, kind: str, count: int) -> "array[Any]":
        values = array("B" if kind == "?" else kind)
        size = values.itemsize * count
        at = self._step(size)
        values.frombytes(self._data[at : at + size])
        return values

    def string(self) -> str:
        length = self.number("Q")
        at = self._step(length)
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.file}: a text in it is no UTF-8; {_GET_AGAIN}") from error

    def value(self, kind: int) -> Any:
        """Reads one value of the metadata, whose type GGUF numbers ``kind``."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise CheckpointError(f"{self.file}: metadata of type {kind}; {_GET_AGAIN}")
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        if kind != _STRING:
            raise CheckpointError(
                f"{self.file}: metadata has an array of type {kind}; {_GET_AGAIN}"
            )
        strings = Strings(file=self.file, offset=self.at, count=count)
        self._step(8 * count)
        at, length_at = self.at - 8 * count, _LENGTH.unpack_from
        for _ in range(count):  # There may be a million, so this is as fast as Python allows.
            if at + 8 > self._end:
                at = self._end + 1
                break
            at += 8 + length_at(self._data, at)[0]
        self.at = at
        self._step(0)
        return strings

    def _step(self, size: int) -> int:
        """Moves past the next ``size`` bytes; returns the offset at which they begin."""
        at, self.at = self.at, self.at + size
        if self.at > self._end:
            raise CheckpointError(
                f"{self.file}: its header does not end within {self._end} bytes; {_GET_AGAIN}"
            )
        return at


def mapped(file: Path) -> mmap.mmap:
    """The file's bytes, memory-mapped, so that only pages that are accessed are read."""
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
