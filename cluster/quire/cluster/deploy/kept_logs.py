"""Keeps the logs of each start in a folder that outlives the cluster.

    QUIRE_STATE_DIR   parent folder, instead of ``$XDG_STATE_HOME/quire`` or ~/.local/state/quire

While the cluster runs, the folder has a link ``live`` to the logs; at its end it gets a copy.
At most `_MAX_FOLDERS` folders of at most `_MAX_BYTES` together are kept; the oldest are removed.
"""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_MAX_FOLDERS = 10
_MAX_BYTES = 256 * 2**20
_MAX_FILE_BYTES = 16 * 2**20
"""Only the last part, of this size, of a longer file is kept."""
_LIVE = "live"
_ADDRESS = "ray-address"


def state_folder() -> Path:
    """Quire's state folder, which may not exist yet. Raises RuntimeError: there is no home
    directory."""
    if chosen := os.environ.get("QUIRE_STATE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "quire"


@contextlib.contextmanager
def kept(logs: Path) -> Iterator[Path | None]:
    """Yields the folder that gets a copy of ``logs`` at the end of the block; ``None``, with a
    warning, if it cannot be made."""
    try:
        folder = _new_folder(state_folder() / "logs")
        (folder / _LIVE).symlink_to(logs)
    except (OSError, RuntimeError) as error:
        _log.warning("logs are not kept: %s; QUIRE_STATE_DIR names another folder", error)
        yield None
        return
    try:
        yield folder
    finally:
        _copy(logs, folder)
        for name in (_LIVE, _ADDRESS):
            (folder / name).unlink(missing_ok=True)
        _remove_oldest(folder.parent)


def note_address(folder: Path | None, address: str) -> None:
    """Writes the address of a start's Ray cluster beside its logs, for `addresses_here`."""
    if folder is not None:
        with contextlib.suppress(OSError):  # The address is also printed.
            (folder / _ADDRESS).write_text(f"{address}\n", encoding="utf-8")


def addresses_here() -> list[str]:
    """The addresses of the Ray clusters of running `quire serve`s on this machine, newest first."""
    with contextlib.suppress(OSError, RuntimeError):
        folders = [each for each in (state_folder() / "logs").iterdir() if _is_of_running(each)]
        files = [each / _ADDRESS for each in sorted(folders, key=_age)]
        return [each.read_text(encoding="utf-8").strip() for each in files if each.exists()]
    return []


@contextlib.contextmanager
def logs_named(place: object, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Adds a note with the place of the logs to exceptions in the block, except to those of the
    types ``but``."""
    try:
        yield
    except BaseException as error:
        if place is not None and not isinstance(error, but):
            error.add_note(f"logs: {place}")
        raise


def _new_folder(parent: Path) -> Path:
    # Private, because tracebacks may have prompts.
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(mode=0o700)
    _remove_oldest(parent)
    return folder


def _copy(logs: Path, folder: Path) -> None:
    """Copies the logs that can be copied. An error must not prevent the end of a cluster: the last
    one is logged as a warning."""
    failed: OSError | None = None
    for source in sorted(path for path in logs.rglob("*") if path.is_file()):
        try:
            _copy_end(source, folder / source.relative_to(logs))
        except OSError as error:
            failed = error
    if failed is not None:
        _log.warning("not all logs are kept in %s: %s", folder, failed)


def _copy_end(source: Path, target: Path) -> None:
    """Copies the last bytes of a file that has any. Raises OSError."""
    if source.is_symlink() or not source.stat().st_size:
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with source.open("rb") as whole, target.open("wb") as copy:
        whole.seek(max(0, source.stat().st_size - _MAX_FILE_BYTES))
        shutil.copyfileobj(whole, copy)


def _remove_oldest(parent: Path) -> None:
    num_bytes = 0
    folders = [each for each in parent.iterdir() if each.is_dir() and not each.is_symlink()]
    for number, folder in enumerate(sorted(folders, key=_age)):
        num_bytes += sum(file.lstat().st_size for file in folder.rglob("*"))
        if (
            number
            and not _is_of_running(folder)
            and (number >= _MAX_FOLDERS or num_bytes > _MAX_BYTES)
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _is_of_running(folder: Path) -> bool:
    """Whether the process whose id is in the folder's name still runs."""
    return is_running(folder.name.rpartition("-")[2])


def is_running(pid: str) -> bool:
    """Whether ``pid`` is the id of a process that runs."""
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def _age(folder: Path) -> float:
    return -folder.lstat().st_mtime
