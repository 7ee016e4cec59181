"""A flag for each field of a class of settings. All that is known of it stands at the field."""

import argparse
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from quire.cluster.config import ClusterConfig
from quire.cluster.settings import Setting, settings_in
from quire.worker.request.errors import ConfigError

Settings = dict[str, Any]
"""Settings by name; those of a section are in a mapping of its own."""

MODEL_HELP = (
    "a checkpoint directory, a GGUF file, or ORG/NAME[/FILE.gguf][@REVISION] of the Hugging Face "
    "hub; without one, the demo model"
)


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type,
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Adds the flag of each setting of ``kind``, except those ``without``. ``defaults`` are the
    command's own, as `given_settings` returns them."""
    settings = [each for each in settings_in(kind) if each.flag and each.name not in without]
    abouts: dict[str, str] = {}
    for each in settings:
        abouts[each.owner.title] = abouts.get(each.owner.title) or each.owner.about
    groups = {group.title: group for group in parser._action_groups}
    for each in settings:
        title = each.owner.title
        if title not in groups:
            groups[title] = parser.add_argument_group(title, abouts[title] or None)
        names = [name for name in (each.flag, each.options.get("short")) if name]
        options = {"dest": ".".join(each.path), "default": argparse.SUPPRESS, **_options(each)}
        action = groups[title].add_argument(*names, help=each.name, **options)
        action.setting = each  # type: ignore[attr-defined]
        action.shown = _found(defaults or {}, each.path, each.default)  # type: ignore[attr-defined]
    parser.set_defaults(defaults=defaults or {})


def given_settings(arguments: argparse.Namespace, kind: type) -> Settings:
    """The settings of ``kind`` that have been given as flags. Raises ConfigError: a file that one
    of them names cannot be read."""
    found: Settings = {}
    for each in settings_in(kind):
        if each.flag and (dest := ".".join(each.path)) in vars(arguments):
            put(found, each.path, from_flag(each, getattr(arguments, dest)))
    return found


def check_autoscaling(given: Settings, settings: Settings) -> None:
    """Raises ConfigError: flags set bounds of autoscaling, and nothing in ``settings`` turns it
    on."""
    bounds = given.get("autoscaling", {})
    if bounds and "max_groups" not in settings["autoscaling"]:
        raise ConfigError(
            f"{', '.join(bounds)}: max_groups must say up to how many groups there may be"
        )


def from_flag(setting: Setting, value: Any) -> Any:
    """What a flag's value means for its setting."""
    if setting.name == "chat_template" and isinstance(value, str):
        return template_text(value)
    return value


def put(settings: Settings, path: tuple[str, ...], value: Any) -> None:
    """Sets the value at ``path``."""
    *sections, name = path
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[name] = value


def help_of(action: argparse.Action) -> str:
    """The help text of a setting's flag: its docstring, in which settings are written as flags, and
    its default."""
    flags = {each.name: each.flag for each in settings_in(ClusterConfig) if each.flag}
    setting: Setting = action.setting  # type: ignore[attr-defined]
    default: object = action.shown  # type: ignore[attr-defined]
    text = re.sub(r"``([^`]+)``", lambda found: flags.get(found[1], found[1]), setting.text)
    is_shown = default is not None and default is not False and default != ()
    return f"{text} (default: {default})" if is_shown else text


def template_text(given: str | None) -> str | None:
    """A chat template's text, given as a file or written out."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {given}: cannot be read as text: {error}") from error


def absolute(given: Path) -> Path:
    """An absolute path if ``given`` exists here, for processes with another working directory.
    Other paths are kept: they may have a meaning elsewhere."""
    return given.absolute() if given.exists() else given


def _options(setting: Setting) -> dict[str, Any]:
    """The options of ``add_argument`` for a setting's type."""
    kind, options = setting.kind, setting.options
    if kind is bool:
        is_off = setting.default is False
        return {"action": "store_true" if is_off else argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    metavar = options.get("metavar", setting.flag.lstrip("-").replace("-", "_").upper())
    if get_origin(kind) is tuple:
        return {"action": "append", "metavar": metavar}
    read = {"type": kind if kind in (int, float, Path) else str}
    if choices := options.get("choices"):
        shown = {"metavar": metavar} if "metavar" in options else {}
        return {**read, **shown, "choices": tuple(choices)}
    return {**read, "metavar": metavar}


def _found(settings: Mapping[str, Any], path: tuple[str, ...], default: Any) -> Any:
    found: Any = settings
    for part in path:
        found = found.get(part, default) if isinstance(found, Mapping) else default
    return found
