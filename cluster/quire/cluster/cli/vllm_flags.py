"""Translates the command line of ``vllm serve`` to Quire's."""

import json
from collections.abc import Collection, Iterable, Sequence

from quire.worker.request.errors import ConfigError
from quire.worker.request.vllm_names import ALWAYS, REFUSED, SPELLED, VALUES

_TAKEN_APART = ("--model", "--revision", "--allowed-origins")


def translated(arguments: Sequence[str], known: Iterable[str]) -> tuple[list[str], list[str]]:
    """``arguments`` of ``vllm serve`` with Quire's flags, and notes on flags that have no effect.
    ``known`` are Quire's own flags.

    Raises:
        ConfigError: One of vLLM's flags has no counterpart; the message says why.
    """
    ours, notes, names = list[str](), list[str](), set(known)
    model, revision = "", ""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if flag == "--":
            ours += [argument, *rest]
            break
        if flag.startswith("--"):
            flag = flag.replace("_", "-")  # vLLM accepts both.
        if flag in names or not flag.startswith("-"):
            if flag in VALUES and (has_value or rest):
                value = value if has_value else rest.pop(0)
                ours += [flag, VALUES[flag].get(value, value)]
            else:
                ours.append(f"{flag}={value}" if has_value else flag)
        elif own_flag(flag, names) is None:
            notes.append(f"{flag} changes nothing: {ALWAYS[flag]}")
        elif flag in SPELLED or flag in _TAKEN_APART:
            if not has_value and not rest:
                raise ConfigError(f"{flag}: a value must follow")
            value = value if has_value else rest.pop(0)
            if flag == "--model":
                model = value
            elif flag == "--revision":
                revision = value
            elif flag == "--allowed-origins":
                ours += [each for origin in origins(value) for each in ("--allow-origin", origin)]
            else:
                ours += [SPELLED[flag], value]
        else:
            ours.append(argument)
    ours = [*([model] if model else ()), *ours]
    if revision:
        if not ours or ours[0].startswith("-"):
            raise ConfigError(f"--revision {revision}: spell the model MODEL@{revision}")
        ours[0] += f"@{revision}"
    return ours, notes


def own_flag(flag: str, known: Collection[str]) -> str | None:
    """Quire's flag for one of vLLM's, or ``None`` if it has no effect. Others are returned as they
    are. Raises ConfigError: it has no counterpart; the message says why."""
    if flag in known:
        return flag
    if flag in ALWAYS:
        return None
    if flag in REFUSED or (flag.startswith("--no-") and f"--{flag[5:]}" in ALWAYS):
        why = REFUSED.get(flag) or ALWAYS[f"--{flag[5:]}"]
        raise ConfigError(f"{flag} of vLLM is not served: {why}")
    return SPELLED.get(flag, flag)


def origins(value: str) -> list[str]:
    """The origins in a JSON list. Raises ConfigError: it is none."""
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ConfigError(f'--allowed-origins {value}: must be a JSON list, such as ["*"]')
    return found
