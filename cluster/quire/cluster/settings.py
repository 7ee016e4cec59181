"""What settings there are, and a cluster's configuration from and to plain values, such as the
``args`` of a Serve application in a file, or the list of models that gateways receive."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from inspect import get_annotations
from typing import Any, TypeVar, get_type_hints

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.worker.request.errors import ConfigError
from quire.worker.request.settings import Branch, attributes_of, plain_type

_Config = TypeVar("_Config", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a class of settings, or of one of its sections."""

    path: tuple[str, ...]
    """The section's name, if any, and the field's."""
    owner: type[Any]
    """The branch that declares it."""
    kind: Any
    """Its type, without ``None``."""
    default: Any
    """`dataclasses.MISSING` if it must be given."""
    options: Mapping[str, Any]
    """What `quire.worker.request.settings.setting` says of it."""

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        """Its flag; empty if it has none."""
        flag = self.options.get("flag", self.name)
        if flag is None or self.default is MISSING or not self.owner.title:
            return ""
        return f"--{flag.replace('_', '-')}"

    @property
    def text(self) -> str:
        """Its docstring, with the names that it may have and what they mean."""
        text = attributes_of(self.owner)[self.name].text
        choices = self.options.get("choices", ())
        if isinstance(choices, Mapping):
            text += f" {'; '.join(f'{name}: {what}' for name, what in choices.items())}."
        if listed := self.options.get("listed"):
            text += f" There are {', '.join(listed)}."
        return text


@cache
def settings_in(kind: type, *place: str) -> tuple[Setting, ...]:
    """All settings of a dataclass, those of its sections last. ``place`` is the path to it."""
    types, declared = get_type_hints(kind), {each.name: each for each in fields(kind)}
    sections = sections_of(kind)
    found = []
    for owner in kind.__mro__:
        for name in get_annotations(owner):
            field = declared.pop(name, None)
            if field is None or name in sections:
                continue
            found.append(
                Setting(
                    path=(*place, name),
                    owner=owner,
                    kind=plain_type(types[name]),
                    default=field.default,
                    options=field.metadata,
                )
            )
    for name in reversed(sections):  # The engine's, of which there are most, come last.
        section: type = sections[name]
        found += settings_in(section, *place, name)
    return tuple(found)


@cache
def sections_of(kind: type) -> dict[str, type[Any]]:
    """The fields of ``kind`` that are settings of their own."""
    types = {each.name: plain_type(get_type_hints(kind)[each.name]) for each in fields(kind)}
    return {
        name: type_
        for name, type_ in types.items()
        if isinstance(type_, type) and issubclass(type_, Branch)
    }


def merged(*each: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a cluster combined; for equal names, the last one wins."""
    merged: dict[str, Any] = {}
    for settings in each:
        for name, value in settings.items():
            if name in sections_of(ClusterConfig) and isinstance(value, Mapping):
                before = merged.get(name)
                value = (dict(before) if isinstance(before, Mapping) else {}) | dict(value)
            merged[name] = value
    return merged


def config_from(settings: Mapping[str, Any]) -> ClusterConfig:
    """Reads `ClusterConfig`'s fields by name, and under the name of each of its sections, such as
    ``engine``, those of the section. Each entry of the list ``more_models`` has the fields of
    `ModelConfig` likewise.

    Without ``engine.model``, the first model is the demo model.

    Raises:
        ConfigError: A field is unknown, or its value is of the wrong type or cannot work; or a
            further model has no ``engine.model``.
    """
    read = _read(settings, ClusterConfig, "")
    more = read.get("more_models")
    if isinstance(more, list | tuple):  # `_made` refuses any other type.
        read["more_models"] = [
            _read(_section({name: each}, name), ModelConfig, f"{name}.")
            for name, each in ((f"more_models.{number}", each) for number, each in enumerate(more))
        ]
        for number, each in enumerate(read["more_models"]):
            if each["engine"].get("model") is None:
                raise ConfigError(f"more_models.{number}.engine.model: is missing")
    return _made(ClusterConfig, read)


def model_from(settings: Mapping[str, Any]) -> ModelConfig:
    """Reads `ModelConfig`'s fields as `config_from` reads a cluster's. Raises ConfigError."""
    return _made(ModelConfig, _read(settings, ModelConfig, ""))


def settings_of(config: _Config) -> dict[str, Any]:
    """All fields of ``config`` as JSON values, from which `model_from` or `config_from` makes an
    equal one."""
    from pydantic import TypeAdapter

    settings: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return settings


def _made(kind: type[_Config], settings: Mapping[str, Any]) -> _Config:
    from pydantic import TypeAdapter, ValidationError  # `--help` does without.

    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, ConfigError):  # A class of settings has said what is wrong.
            raise own from None
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{place}={first['input']!r}: {first['msg']}") from error


def _read(settings: Mapping[str, Any], kind: type, prefix: str) -> dict[str, Any]:
    """The settings of ``kind``. With an empty ``prefix``, which is that of further models, the demo
    model stands in for a missing model. Raises ConfigError: a setting is unknown."""
    engine, routing = (_section(settings, name) for name in ("engine", "routing"))
    settings = {**settings, "engine": engine, "routing": routing}
    if engine.get("model") is None and not prefix:
        engine["model"] = demo_model.PATH
        settings["served_model_name"] = settings.get("served_model_name") or demo_model.NAME
    for place, given, part in _parts(settings, kind):
        known = [field.name for field in fields(part)]
        unknown = [f"{prefix}{place}{each}" for each in given if each not in known]
        if unknown:
            paths = {each.name: ".".join(each.path) for each in settings_in(kind)}
            paths |= {each: each for each in known}
            name = unknown[0].rpartition(".")[2].replace("-", "_")
            near = get_close_matches(name, paths, n=1, cutoff=0.8)
            question = f"; is {paths[near[0]]} meant?" if near else ""
            raise ConfigError(
                f"{', '.join(unknown)}: unknown; there are {', '.join(known)}{question}"
            )
        for each in settings_in(part):
            value = given.get(each.name) if len(each.path) == 1 else None
            if isinstance(value, bool) and each.kind in (int, float):  # Pydantic would take 1 or 0.
                raise ConfigError(f"{prefix}{place}{each.name}={value}: must be a number")
    return settings


def _parts(
    settings: Mapping[str, Any], kind: type
) -> Iterator[tuple[str, Mapping[str, Any], type]]:
    """The settings and their sections, each with its class."""
    yield "", settings, kind
    for name, section in sections_of(kind).items():
        given = settings.get(name)
        if isinstance(given, Mapping):  # `_made` refuses a wrong type later.
            yield f"{name}.", given, section


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = settings.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={given!r}: must be a mapping of settings to their values")
    return dict(given)
