"""The name of an application: several run side by side on one Ray cluster, each under its own.

Serve knows an application by its name alone: one that is deployed under a name in use replaces the
one that has it.
"""

import re

from quire.worker.api.errors import ConfigError

# Serve puts it into names of log files, and parts it from a deployment's by '#'.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARS = 63


def name_of_application(model_name: str, given: str | None = None) -> str:
    """The name that was ``given``, or one made from what clients call the model.

    Raises:
        ConfigError: It cannot be a name.
    """
    if given is None:
        made = _OTHERS.sub("-", model_name).lstrip("._-")[:_MAX_CHARS]
        return made or "quire"
    if not _NAME.fullmatch(given):
        raise ConfigError(
            f"name={given!r}: must begin with a letter or digit and go on with up to 62 of "
            "letters, digits, '.', '_' and '-'"
        )
    return given


def check_free(name: str) -> None:
    """Raises ConfigError where the Ray cluster that this process is connected to has an application
    of this name."""
    known = _applications()
    if name in known:
        raise ConfigError(
            f"name={name!r}: this Ray cluster has an application of that name ({known[name]}); "
            "take another with --name, or stop that one first: Ctrl-C where it is served, or "
            f"`quire stop {name}`"
        )


def check_known(name: str) -> None:
    """Raises ConfigError where it has none."""
    known = _applications()
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"name={name!r}: this Ray cluster has no such application; there are: {listed}"
        )


def _applications() -> dict[str, str]:
    """The state of each, in words."""
    from ray import serve

    return {
        name: each.status.lower().replace("_", " ")
        for name, each in serve.status().applications.items()
    }
