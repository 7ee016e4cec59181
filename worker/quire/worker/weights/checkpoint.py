"""The contents of a checkpoint: the tensors of its safetensors files or of a GGUF file, by name.

Only headers are read here, so a checkpoint of any size is checked in milliseconds: every file
that the index names must exist and be as long as its header says. Does not import torch.
"""

import json
import os
import reprlib
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.gguf.container import find_gguf
from quire.worker.weights.modules_file import transformer_folder

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""
_MAX_JSON_BYTES = 256 << 20
_TEXT_PARTS = (
    ("language_model.model.", "language_model.lm_head"),
    ("model.language_model.", "lm_head"),
    ("model.text_model.", "lm_head"),
    ("model.", "lm_head"),
)
"""Name prefixes of the text decoder and of its LM head in the files of multimodal models."""
TEXT_PREFIXES = tuple(inner for inner, _ in _TEXT_PARTS)
"""Name prefixes of the text decoder's layers, the longer ones first."""
_MAX_NAME = 200
"""Characters of a file's name; file systems take 255 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor's place in the files, and its shape when it is read."""

    file: Path
    name: str
    """The tensor's name in the file."""
    dtype: str
    """The type by safetensors' name: F32, BF16, F16, … Decoded values are F32."""
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The weight files of a model, in the order of their names, and every tensor in them."""

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    """The tensors by their names in a text decoder, without the prefixes of a larger model."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs of a name prefix in ``tensors`` and the one in the files, if they differ."""

    def name_in_files(self, name: str) -> str:
        """The name of a tensor or a module in the files."""
        for ours, theirs in self.prefixes:
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    decoded: str = ""
    """Which quantised tensors of a GGUF file are decoded when read, and their decoded size, as
    text."""

    def find(self, name: str, *shapes: tuple[int, ...]) -> TensorInfo:
        """The tensor ``name``, which must have one of ``shapes``, if any are given.

        Raises:
            CheckpointError: It is missing or has another shape.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} {list(shapes[0]) if shapes else ''} is in none of "
                f"{', '.join(file.name for file in self.files)}"
            )
        if shapes and info.shape not in shapes:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has shape {list(info.shape)}, "
                f"config.json asks for {list(shapes[0])}"
            )
        return info


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads the headers of the safetensors files in ``path``, or of its GGUF file.

    Raises:
        CheckpointError: No weights, a missing or truncated file, or an invalid header.
    """
    if (gguf := find_gguf(path)) is not None:
        from quire.worker.weights.gguf.source import open_gguf  # It makes a Checkpoint.

        return open_gguf(gguf)
    path = transformer_folder(path)
    files = _weight_files(path)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_tensors(file))
    return Checkpoint(path=path, files=files, tensors=tensors)


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """A multimodal model's checkpoint, with the names that its text decoder would have alone."""
    names = checkpoint.tensors
    inner, head = next(
        (each for each in _TEXT_PARTS if any(name.startswith(each[0]) for name in names)),
        _TEXT_PARTS[-1],
    )
    prefixes = (("model.", inner), ("lm_head", head))
    tensors = {}
    for name, info in checkpoint.tensors.items():
        for ours, theirs in prefixes:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
                break
        tensors[name] = info
    return replace(checkpoint, tensors=tensors, prefixes=prefixes)


def bare_decoder(checkpoint: Checkpoint) -> Checkpoint:
    """A headless decoder's checkpoint, with the names that it would have if saved with its head."""
    if any(name.startswith("model.") for name in checkpoint.tensors):
        return checkpoint
    tensors = {f"model.{name}": info for name, info in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors, prefixes=(("model.", ""),))


def open_file(file: Path, *, max_bytes: int | None = None) -> BinaryIO:
    """Opens a regular file for reading. A FIFO or a device has no end, or never opens.

    Raises:
        CheckpointError: It is no regular file or has more than ``max_bytes``.
        OSError: It cannot be opened.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and (max_bytes is None or found.st_size <= max_bytes):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file}: is no regular file")
    raise CheckpointError(f"{file}: {found.st_size} bytes; such a file may have {max_bytes}")


def read_json(file: Path, *, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in ``file``.

    Raises:
        CheckpointError: It cannot be read, has more than ``max_bytes``, or is not a JSON object.
    """
    try:
        with open_file(file, max_bytes=max_bytes) as stream:
            value = json.loads(stream.read(max_bytes).decode())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON that can be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: a JSON {type(value).__name__} instead of an object")
    return value


def read_header(file: Path, *, max_bytes: int = _MAX_HEADER_BYTES) -> bytes:
    """The JSON header of a safetensors file, undecoded.

    Raises:
        CheckpointError: The file cannot be read or ends before its header does, or the header has
            more than ``max_bytes``.
    """
    try:
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= _MAX_HEADER_BYTES or size < 8 + length:
                raise CheckpointError(
                    f"{file}: truncated or not safetensors ({size} bytes, header of {length})"
                )
            if length > max_bytes:
                raise CheckpointError(
                    f"{file}: its safetensors header has {length} bytes; it may have {max_bytes}"
                )
            return stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / INDEX_NAME).is_file():
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX_NAME}: has no weight_map")
        files = tuple(path / name for name in sorted(set(_file_names(weight_map, path))))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{path}: {INDEX_NAME} names {len(files)} files, {len(missing)} of them missing: "
                f"{', '.join(missing)}"
            )
        return files
    if (path / SINGLE_NAME).is_file():
        return (path / SINGLE_NAME,)
    others = sorted(file.name for file in path.glob("*.bin"))
    found = f"; found {', '.join(others)}, of a format that is not read" if others else ""
    raise CheckpointError(f"{path}: neither {SINGLE_NAME} nor {INDEX_NAME}{found}")


def _file_names(weight_map: dict[str, Any], path: Path) -> Iterator[str]:
    """The files of an index, all of which must be in the index's own folder."""
    for tensor, name in weight_map.items():
        is_plain = isinstance(name, str) and name not in ("", ".", "..")
        if not is_plain or len(name) > _MAX_NAME or set(name) & {"/", "\\", "\0"}:
            raise CheckpointError(
                f"{path / INDEX_NAME}: weight_map has {reprlib.repr(name)} for {tensor!r}; it must "
                "be the name of a file in the same directory"
            )
        yield name


def read_tensors(file: Path, *, max_header_bytes: int = _MAX_HEADER_BYTES) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name. Raises CheckpointError."""
    header = read_header(file, max_bytes=max_header_bytes)
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its safetensors header cannot be read: {error}") from error
    if not isinstance(entries, dict):
        kind = type(entries).__name__
        raise CheckpointError(f"{file}: its safetensors header is a JSON {kind}, not an object")
    entries.pop("__metadata__", None)
    tensors = {}
    data_bytes = 0
    for name, entry in entries.items():
        fields = entry if isinstance(entry, dict) else {}
        dtype, shape = fields.get("dtype"), fields.get("shape")
        offsets = fields.get("data_offsets")
        if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets, count=2)):
            raise CheckpointError(
                f"{file}: its safetensors header has {reprlib.repr(entry)} for {name!r}; it must "
                "have dtype, shape and data_offsets: the file is damaged, get it again"
            )
        tensors[name] = TensorInfo(file=file, name=name, dtype=dtype, shape=tuple(shape))
        data_bytes = max(data_bytes, offsets[1])
    expected = 8 + len(header) + data_bytes
    actual = file.stat().st_size
    if actual != expected:
        raise CheckpointError(
            f"{file}: {actual} bytes, but its header says {expected}: truncated or damaged"
        )
    return tensors


def _are_sizes(value: Any, *, count: int | None = None) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of integers of 0 or more, ``count`` of them if given."""
    return (
        isinstance(value, list)
        and count in (None, len(value))
        and all(type(size) is int and size >= 0 for size in value)
    )
