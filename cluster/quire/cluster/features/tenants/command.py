"""``quire keys``: creates, lists and revokes API keys in a keys file of the second format.

A file is edited line by line, so that comments and layout stay. It is written only if the edited
text means exactly the intended change.
"""

import argparse
import sys
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cluster.cli.columns import table, terminal_width
from quire.cluster.cli.help import DefaultsFormatter, Parser
from quire.worker.request.errors import ConfigError

if TYPE_CHECKING:
    from quire.cluster.features.tenants.keys_file import KeyEntry

_SECOND_HEAD = "# API keys of quire serve --api-keys-file; 'quire keys' changes it.\n"


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Makes, lists and revokes API keys in a file for --api-keys-file. Gateways "
        "read a changed file within seconds."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    for name, run, told in (
        ("new", _new, "make a key, print it once, and add its hash to the file"),
        ("hash", _hash, "print the hash of the key on standard input, for a file"),
        ("list", _list, "show the keys of a file"),
        ("revoke", _revoke, "remove a key from a file; running requests continue"),
    ):
        action = actions.add_parser(
            name,
            help=told,
            description=f"{told[0].upper()}{told[1:]}.",
            formatter_class=DefaultsFormatter,
        )
        action.set_defaults(run=run)
        if name == "new":
            action.add_argument("--tenant", required=True, help="the tenant of the key")
            action.add_argument("--name", required=True, help="the name of the key")
            action.add_argument(
                "--expires", help="when it expires: a date, or a time such as 2027-01-31T12:00:00Z"
            )
            action.add_argument(
                "--file", type=Path, help="the keys file, which is created if it does not exist"
            )
        if name == "revoke":
            action.add_argument("name", help="the name of the key")
        if name in ("list", "revoke"):
            action.add_argument("--file", type=Path, required=True, help="the keys file")


def _new(arguments: argparse.Namespace) -> int:
    from quire.cluster.features.tenants.keys_file import hash_of, new_key

    key = new_key()
    entry = {"name": arguments.name, "tenant": arguments.tenant, "hash": hash_of(key)}
    if arguments.expires:
        entry["expires"] = arguments.expires
    _checked(entry)
    if arguments.file is None:
        print(f"# under keys of the keys file:\n- {_flow(entry)}", file=sys.stderr)
    else:
        is_new_tenant = add_entry(arguments.file, entry)
        if is_new_tenant:
            told = "had no such tenant: it has one without limits now"
            print(f"{arguments.file} {told}, {arguments.tenant}", file=sys.stderr)
    print("This is the key, which is kept nowhere:", file=sys.stderr)
    print(key)
    return 0


def _hash(arguments: argparse.Namespace) -> int:
    from quire.cluster.features.tenants.keys_file import hash_of

    key = sys.stdin.readline().strip()
    if not key or len(key.split()) != 1:
        raise ConfigError("standard input: must be one key, without spaces")
    print(hash_of(key))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    _, entries = _entries(arguments.file)
    lines = [(each.name, each.tenant, _until(each), f"{each.hash[:15]}…") for each in entries]
    rows = [("name", "tenant", "expires", "hash"), *lines]
    print(table(rows, width=terminal_width()) if lines else "There is no key.")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    remove_entry(arguments.file, arguments.name)
    print(f"{arguments.name} is revoked; gateways know within seconds")
    return 0


_A_NAME = "1 to 64 letters, digits, '.', '_' and '-', and not all digits or a word of YAML's"
_MUST_BE = {
    "name": _A_NAME,
    "tenant": f"{_A_NAME}; an operator's tenant has `operator: true` in the file",
    "expires": "a date or a time, such as 2027-01-31T12:00:00Z",
}


def add_entry(path: Path, entry: dict[str, str]) -> bool:
    """Adds a key to the file, and its tenant if missing; returns whether the tenant was added.
    Raises ConfigError, with nothing changed, if the file cannot be used or has a key of this
    name."""
    if not path.exists():
        text = f"tenants:\n  {entry['tenant']}: {{}}\nkeys:\n- {_flow(entry)}\n"
        _write(path, _SECOND_HEAD + text)
        return True
    text, entries = _entries(path)
    if any(each.name == entry["name"] for each in entries):
        raise ConfigError(f"--name {entry['name']}: {path} has a key of this name")
    data = _data(text)
    tenants = data.get("tenants") or {}
    is_new = entry["tenant"] not in tenants
    lines = text.splitlines()
    wanted = {
        "tenants": tenants | ({entry["tenant"]: {}} if is_new else {}),
        "keys": [_data(_flow(entry)), *(data.get("keys") or [])],
    }
    _insert(lines, text, "keys", f"- {_flow(entry)}")
    if is_new:
        _insert(lines, "\n".join(lines), "tenants", f"{entry['tenant']}: {{}}")
    _replace(path, lines, wanted, by_hand=f"add under keys: - {_flow(entry)}")
    return is_new


def remove_entry(path: Path, name: str) -> None:
    """Removes the key ``name``. Raises ConfigError, with nothing changed, if the key does not exist
    or is the only one."""
    text, entries = _entries(path)
    places = [place for place, each in enumerate(entries) if each.name == name]
    if not places:
        known = ", ".join(each.name for each in entries) or "none"
        raise ConfigError(f"{path} has no key named {name!r}: there are {known}")
    if len(entries) == 1:
        raise ConfigError(
            f"{name!r} is the only key of {path}, and gateways keep the former file rather than "
            "use one without keys: make another key first"
        )
    (place,) = places
    data = _data(text)
    del data["keys"][place]
    node = _section(text, "keys").value[place]
    lines = text.splitlines()
    first, last = node.start_mark.line, node.end_mark.line
    if node.end_mark.column or last >= len(lines):
        last = min(last + 1, len(lines))
    # Comments and blank lines before the next entry belong to that entry, not to this block.
    while last > first + 1 and (not lines[last - 1].strip() or lines[last - 1].strip()[0] == "#"):
        last -= 1
    indent = node.start_mark.column
    while last > first + 1 and lines[last - 1][:indent].strip() == "-":
        last -= 1
    del lines[first:last]
    _replace(path, lines, data, by_hand=f"remove the key {name!r}")


def _insert(lines: list[str], text: str, section: str, line: str) -> None:
    """Inserts ``line`` before the first item of a section in block style; adds the section if
    missing. `_replace` detects layouts for which that does not work."""
    node = _section(text, section)
    if node is None:
        lines += [f"{section}:", f"  {line}"]
    elif node.value:
        first = node.start_mark
        lines.insert(first.line, " " * first.column + line)
    else:
        place = node.start_mark.line
        lines[place : place + 1] = [f"{section}:", f"  {line}"]


def _section(text: str, name: str) -> Any:
    """The YAML node of a section; ``None`` if the section is missing."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    return next((value for key, value in root.value if key.value == name), None)


def _entries(path: Path) -> "tuple[str, list[KeyEntry]]":
    """The text and the keys of the file. Raises ConfigError."""
    from quire.cluster.features.tenants.keys_file import entries_of, is_second, read_text

    text = read_text(path)
    if not is_second(text):
        raise ConfigError(
            f"{path} has one key a line, which 'quire keys' does not change: begin a file with "
            "'quire keys new', and bring over the old keys with 'quire keys hash'"
        )
    return text, entries_of(path, text)[1]


def _checked(entry: dict[str, str]) -> None:
    """Raises ConfigError if a field is malformed."""
    import yaml
    from pydantic import ValidationError

    from quire.cluster.features.tenants.keys_file import KeyEntry

    read: dict[str, Any] = {}
    for name, value in entry.items():
        try:
            read[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):
            read[name] = ...  # A value that no field accepts.
    try:
        KeyEntry.model_validate(read)
    except ValidationError as error:
        name = str(error.errors(include_url=False)[0]["loc"][0])
        raise ConfigError(f"--{name} {entry[name]!r}: must be {_MUST_BE[name]}") from None


def _flow(entry: dict[str, str]) -> str:
    """The entry as one line of YAML."""
    values = {**entry, "hash": f'"{entry["hash"]}"'}
    return "{" + ", ".join(f"{name}: {value}" for name, value in values.items()) + "}"


def _data(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def _replace(path: Path, lines: list[str], wanted: dict[str, Any], *, by_hand: str) -> None:
    """Writes ``lines`` if their data equal ``wanted``. Raises ConfigError if not."""
    import yaml

    text = "\n".join(lines) + "\n"
    try:
        is_right = _data(text) == wanted
    except (yaml.YAMLError, ValueError):
        is_right = False
    if not is_right:
        raise ConfigError(f"{path}: its layout is not one that can be changed here; {by_hand}")
    _write(path, text)


def _write(path: Path, text: str) -> None:
    """Replaces the file atomically, so that a gateway never reads half of it."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        part.touch(mode=mode)
        part.write_text(text, encoding="utf-8")
        part.replace(path.resolve())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _until(entry: "KeyEntry") -> str:
    if entry.expires_s == inf:
        return "never"
    moment = datetime.fromtimestamp(entry.expires_s, UTC)
    is_over = moment <= datetime.now(UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC" + (" (is over)" if is_over else "")
