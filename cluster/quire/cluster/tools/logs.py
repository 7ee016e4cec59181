"""``quire logs``: the logs of gateways and groups that `quire serve` keeps, merged by time."""

import argparse
import re
import time
from collections.abc import Iterator
from pathlib import Path

from quire.cluster.cli.help import Parser, whole
from quire.worker.request.errors import ConfigError

_LOOK_S = 0.3
_MAX_LINE_BYTES = 2**16
_REPLICA = re.compile(r"replica_.*?(Gateway|ReplicaGroup)_(\w+)\.log")
_KINDS = {"Gateway": "gateway", "ReplicaGroup": "group"}


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Shows the logs of gateways and groups that `quire serve` has kept, those of "
        "the newest start unless another is named."
    )
    parser.add_argument("start", nargs="?", help="a start, as --list shows it")
    parser.add_argument("--list", action="store_true", help="show which starts have logs")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue with new lines as they are written"
    )
    parser.add_argument(
        "-n", "--lines", type=whole(least=0), default=200, help="show this many of the last lines"
    )
    parser.add_argument("--of", metavar="ID", help="only the gateway or group of this id")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.deploy.kept_logs import state_folder

    parent = state_folder() / "logs"
    starts = sorted(each for each in parent.glob("*") if each.is_dir() and not each.is_symlink())
    if arguments.list:
        for each in starts:
            print(f"{each.name}  {'runs' if _live(each).is_symlink() else 'ended'}  {each}")
        return 0
    folder = _chosen(starts, arguments.start, parent)
    files = _files(folder, arguments.of)
    for name, line in _last(files, arguments.lines):
        print(f"{name}  {line}")
    if arguments.follow:
        for name, line in _following(folder, arguments.of, files):
            print(f"{name}  {line}", flush=True)
    return 0


def _chosen(starts: list[Path], wanted: str | None, parent: Path) -> Path:
    if not starts:
        raise ConfigError(f"{parent} has no logs: `quire serve` keeps them there")
    if wanted is None:
        return starts[-1]
    for each in starts:
        if each.name == wanted:
            return each
    raise ConfigError(f"start={wanted!r}: there are {', '.join(each.name for each in starts)}")


def _live(folder: Path) -> Path:
    return folder / "live"


def _files(folder: Path, of: str | None) -> dict[Path, str]:
    """The log files of gateways and groups, each with its process's name."""
    place = _live(folder) if _live(folder).exists() else folder
    found = {}
    for path in sorted((place / "serve").glob("replica_*.log")):
        if match := _REPLICA.fullmatch(path.name):
            kind, name = match.groups()
            if of in (None, name):
                found[path] = f"{_KINDS[kind]} {name}"
    if of is not None and not found:
        raise ConfigError(f"--of {of}: {place} has no log of it")
    return found


def _last(files: dict[Path, str], num: int) -> list[tuple[str, str]]:
    """The last lines of all files, ordered by time. A line without a time stays after its
    predecessor."""
    lines: list[tuple[str, str, str]] = []
    for path, name in files.items():
        stamp = ""
        for line in _tail(path, num):
            stamp = _time_of(line) or stamp
            lines.append((stamp, name, line))
    lines.sort(key=lambda each: each[0])
    return [(name, line) for _, name, line in lines[-num:]] if num > 0 else []


def _tail(path: Path, num: int) -> list[str]:
    """The last lines of a file: ``num``, or more if they are short."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - num * 512 - _MAX_LINE_BYTES))
        return file.read().decode(errors="replace").splitlines()


_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3}")


def _time_of(line: str) -> str:
    match = _TIME.search(line[:100])
    return match[0] if match else ""


def _following(folder: Path, of: str | None, files: dict[Path, str]) -> Iterator[tuple[str, str]]:
    """New lines as they are written, including those of later replicas."""
    places = {path: path.stat().st_size for path in files}
    rest: dict[Path, bytes] = {}
    while True:
        time.sleep(_LOOK_S)
        for path, name in _files(folder, None).items():
            if of is not None and not name.endswith(f" {of}"):
                continue
            size = path.stat().st_size
            begin = places.get(path, 0)
            if size < begin:  # The file was rotated.
                begin = 0
            if size == begin:
                continue
            with path.open("rb") as file:
                file.seek(begin)
                data = rest.pop(path, b"") + file.read(size - begin)
            places[path] = size
            *lines, left = data.split(b"\n")
            if left:
                rest[path] = left[-_MAX_LINE_BYTES:]
            for line in lines:
                yield name, line.decode(errors="replace")
