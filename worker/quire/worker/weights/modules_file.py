"""Reads ``modules.json``, which lists the modules of a sentence-transformers folder.

Imports neither torch nor NumPy.
"""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from quire.worker.request.errors import CheckpointError

MODULES = "modules.json"
_LIBRARY = "sentence_transformers."


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the pipeline."""

    kind: str
    """The name of its class in sentence-transformers."""
    folder: Path
    number: int


def read_modules(path: Path) -> list[Module]:
    """The modules, at least one; none if ``path`` has no ``modules.json``.

    Raises:
        CheckpointError: The file cannot be read, or names code that comes with the checkpoint.
    """
    file = path / MODULES
    if not file.is_file():
        return []
    made = []
    try:
        listed: Any = json.loads(file.read_text(encoding="utf-8"))
        for number, each in enumerate(listed):
            kind, folder = str(each["type"]), PurePosixPath(str(each["path"]))
            if not kind.startswith(_LIBRARY):
                raise CheckpointError(
                    f"{file}: module {number} is {kind!r}: code that comes with a checkpoint "
                    "(trust_remote_code) is not supported"
                )
            if folder.is_absolute() or ".." in folder.parts:
                raise CheckpointError(
                    f"{file}: module {number} has the path {str(folder)!r}, which must be a folder "
                    "beside the file"
                )
            made.append(Module(kind.rpartition(".")[2], path / folder, number))
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: not a list of modules with type and path ({error!r})"
        ) from error
    if not made:
        raise CheckpointError(f"{file}: lists no module")
    return made


def transformer_folder(path: Path) -> Path:
    """The folder of the checkpoint itself in ``path``: its own, or that of its Transformer.

    Raises:
        CheckpointError: ``modules.json`` cannot be read.
    """
    modules = read_modules(path)
    return modules[0].folder if modules else path


def module_folders(path: Path) -> list[str]:
    """The folders of the modules that are not ``path`` itself, relative to it."""
    folders = [each.folder for each in read_modules(path)]
    return [each.relative_to(path).as_posix() for each in folders if each != path]
