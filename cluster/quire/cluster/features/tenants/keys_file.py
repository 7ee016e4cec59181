"""The file of API keys, in either of its two formats.

    KEY              a tenant of its own        tenants:
    KEY acme         of the tenant acme           acme: {weight: 2, requests_per_minute: 600}
    KEY *            an operator's              keys:
                                                  - {name: ci, tenant: acme, hash: "sha256:…"}

The second format is YAML; its first line begins with ``tenants:`` or ``keys:``. It holds only the
SHA-256 of each key. A fast hash is enough for keys that are 256-bit random numbers (`new_key`):
nobody can try them all, so a slow hash would protect nothing and cost time on each request. A fast
hash does not protect a short key that a person chose, and nothing in a hash shows that.

Error messages never quote a line or a value: a key may stand in the wrong place.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from quire.cluster.edge.access import Caller
from quire.cluster.features.tenants.limits import TenantPolicy
from quire.cluster.unique_keys import repeated_key
from quire.worker.request.errors import ConfigError

_MAX_FILE_BYTES = 16 * 2**20
_OPERATOR = "*"
_NAME = r"[A-Za-z0-9._-]{1,64}"
_NAMES = "up to 64 letters, digits, '.', '_' and '-'"
_SECOND_FORMAT = re.compile(r"(tenants|keys)\s*:(\s|$)")
_OWN_TENANT_CHARS = 32
_KEY_BYTES = 32

Name = Annotated[str, StringConstraints(pattern=rf"^{_NAME}\z")]


@dataclass(frozen=True, slots=True)
class KnownKey:
    caller: Caller
    expires_s: float = inf
    """When the key expires, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class KeysFile:
    """The content of a keys file."""

    keys: dict[bytes, KnownKey]
    """The accepted keys, by `digest`."""
    policies: dict[str, TenantPolicy] = field(default_factory=dict)
    """Limits by tenant; a tenant without an entry is not limited."""


class KeyEntry(BaseModel):
    """One key of the second format."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    tenant: Name
    hash: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}\z")]
    expires: datetime | date | None = None
    """A date expires at its start. Without a time zone, the time is UTC."""

    @property
    def expires_s(self) -> float:
        match self.expires:
            case None:
                return inf
            case datetime() as moment:
                pass
            case day:
                moment = datetime.combine(day, time())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class _SecondFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tenants: dict[Name, TenantPolicy | None] = Field(default_factory=dict)
    keys: list[KeyEntry] = Field(default_factory=list)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def hash_of(key: str) -> str:
    """The hash of ``key`` as the second format writes it."""
    return f"sha256:{digest(key).hex()}"


def new_key() -> str:
    """A new random key of 256 bits."""
    return f"qk-{secrets.token_urlsafe(_KEY_BYTES)}"


def hashed_file(keys: Iterable[str]) -> str:
    """The text of a file of the second format with each of ``keys``, which is a tenant alone. The
    tenants' names follow from the keys, so that another key never gets a tenant's cached blocks."""
    names = {key: f"key-{_own_tenant(key).removeprefix('#')}" for key in keys}
    entries = [{"name": name, "tenant": name, "hash": hash_of(key)} for key, name in names.items()]
    # JSON is YAML; the format is told by the first line.
    lines = "".join(f"- {json.dumps(each)}\n" for each in entries)
    tenants = "".join(f"  {name}:\n" for name in names.values())
    return f"tenants:\n{tenants}keys:\n{lines}"


def read_keys_file(path: Path) -> KeysFile:
    """The keys and policies of a file. Raises ConfigError if the file cannot be read, has no key,
    or has a malformed line or field."""
    text = read_text(path)
    found = _of_entries(path, *entries_of(path, text)) if is_second(text) else _of_lines(path, text)
    if not found.keys:
        raise ConfigError(
            f"{_named(path)} has no key: write one a line, or make one with 'quire keys new'"
        )
    return found


def read_text(path: Path) -> str:
    """The file's text. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
                raise ConfigError(f"{_named(path)} has more than {_MAX_FILE_BYTES} bytes")
            return file.read().decode()
    except OSError as error:
        raise ConfigError(f"{_named(path)} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:  # Its message quotes the bytes.
        raise ConfigError(f"{_named(path)} cannot be read: it is not UTF-8") from error


def is_second(text: str) -> bool:
    """Whether ``text`` has the second format."""
    lines = (line.strip() for line in text.splitlines())
    first = next((each for each in lines if each and each != "---" and each[0] != "#"), "")
    return _SECOND_FORMAT.match(first) is not None


def _of_lines(path: Path, text: str) -> KeysFile:
    keys: dict[bytes, KnownKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, *rest = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        if len(rest) > 1 or (rest and rest != [_OPERATOR] and not re.fullmatch(_NAME, rest[0])):
            raise ConfigError(
                f"{_named(path)}, line {number}: must be KEY, KEY TENANT or KEY *;"
                f" a tenant's name has {_NAMES}"
            )
        if digest(key) in keys:
            raise ConfigError(f"{_named(path)}, line {number}: an earlier line has this key")
        is_operator = rest == [_OPERATOR]
        tenant = rest[0] if rest and not is_operator else _own_tenant(key)
        keys[digest(key)] = KnownKey(Caller(tenant=tenant, is_operator=is_operator))
    return KeysFile(keys)


def entries_of(path: Path, text: str) -> tuple[dict[str, TenantPolicy], list[KeyEntry]]:
    """The tenants and the keys of the second format. Raises ConfigError."""
    # Imported here and not above: gateways without a keys file do not need it.
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        repeated = repeated_key(root) if root is not None else None
        data = loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{_named(path)}, line {line}: is not YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{_named(path)} is not YAML") from None
    finally:
        loader.dispose()
    if repeated:
        first, again = repeated
        told = f"this name stands here twice, first in line {first.start_mark.line + 1}"
        raise _wrong(path, again, told)
    try:
        read = _SecondFormat.model_validate(data)
    except ValidationError as error:
        raise _invalid(path, root, error) from None
    return {name: each or TenantPolicy() for name, each in read.tenants.items()}, read.keys


def _of_entries(path: Path, policies: dict[str, TenantPolicy], entries: list[KeyEntry]) -> KeysFile:
    keys: dict[bytes, KnownKey] = {}
    names: set[str] = set()
    for entry in entries:
        of_key, hashed = f"{_named(path)}, key {entry.name!r}", bytes.fromhex(entry.hash[7:])
        if entry.tenant not in policies:
            raise ConfigError(f"{of_key}: its tenant {entry.tenant!r} is not among the tenants")
        if entry.name in names:
            raise ConfigError(f"{of_key}: an earlier key has this name")
        if hashed in keys:
            raise ConfigError(f"{of_key}: an earlier key has this hash")
        names.add(entry.name)
        caller = Caller(
            tenant=entry.tenant,
            key_name=entry.name,
            is_operator=policies[entry.tenant].operator,
        )
        keys[hashed] = KnownKey(caller, entry.expires_s)
    return KeysFile(keys, policies)


def _invalid(path: Path, root: Any, error: ValidationError) -> ConfigError:
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    # A misspelled field is reported as unknown and as missing; the first error names it.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    node, name = _at(root, first["loc"])
    match first["type"]:
        case "extra_forbidden":
            told = f"an unknown field; there are {', '.join(_fields(first['loc']))}"
        case "missing":
            told = f"{first['loc'][-1]}: is missing"
        case "string_pattern_mismatch" if name == "hash":
            told = "hash: must be 'sha256:' and 64 hex digits, as 'quire keys hash' prints it"
        case "string_pattern_mismatch":
            told = f"a name must have {_NAMES}"
        case _:
            told = f"{name}: {first['msg']}" if name else first["msg"]
    return _wrong(path, node, told)


def _at(root: Any, location: tuple[int | str, ...]) -> tuple[Any, str]:
    """The YAML node nearest to ``location``, and the name of its field if that is known."""
    import yaml

    node, name = root, ""
    for step in location:
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            node = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            found = [(key, value) for key, value in node.value if key.value == step]
            if not found:
                break
            key, value = found[0]
            name = str(step) if step in _FIELDS else ""
            node = value if isinstance(value, yaml.CollectionNode) else key
    return node, name or next((str(each) for each in location if each in _FIELDS), "")


_FIELDS = {*_SecondFormat.model_fields, *KeyEntry.model_fields, *TenantPolicy.model_fields}


def _fields(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = _SecondFormat
    if len(location) > 1:
        model = KeyEntry if location[0] == "keys" else TenantPolicy
    return list(model.model_fields)


def _wrong(path: Path, node: Any, told: str) -> ConfigError:
    line = node.start_mark.line + 1 if node is not None else 1
    return ConfigError(f"{_named(path)}, line {line}: {told}")


def _named(path: Path) -> str:
    return f"api_keys_file={str(path)!r}"


def _own_tenant(key: str) -> str:
    """The tenant of a key without a tenant name. No tenant in a keys file can have this name. It
    differs from the digest that keys are looked up by: groups learn tenant names and must not learn
    the digest."""
    named = hashlib.sha256(b"quire tenant\0" + key.encode()).hexdigest()
    return f"#{named[:_OWN_TENANT_CHARS]}"
