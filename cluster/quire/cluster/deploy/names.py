"""Names of Serve applications: several clusters run side by side on one Ray cluster.

    NAME          the gateways; its user chose the name
    NAME:MODEL    the groups of one model
    NAME:MODEL:2  its groups of the second generation, which replace the first

Serve knows an application by its name alone: one that is deployed under a name in use replaces the
one that has it.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from quire.worker.api.errors import ConfigError

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

# Serve puts it into names of log files, and parts it from a deployment's by '#'.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARS = 63
_DIGEST_CHARS = 8


def part_of(model: str, generation: int = 1) -> str:
    """What the name of the application of a model's groups has behind the cluster's: the model's
    own name with ``--`` for ``/``, or, where that is too long or could be another's, a digest."""
    plain = _OTHERS.sub("-", model.replace("/", "--"))
    if plain.replace("--", "/") != model or len(plain) > _MAX_CHARS:
        digest = hashlib.sha256(model.encode()).hexdigest()[:_DIGEST_CHARS]
        plain = f"{plain[: _MAX_CHARS - _DIGEST_CHARS - 1]}-{digest}"
    return plain if generation == 1 else f"{plain}:{generation}"


def next_part(part: str) -> str:
    """The part of the same model's next generation."""
    plain, _, generation = part.partition(":")
    return f"{plain}:{int(generation or 1) + 1}"


def application_of(name: str, part: str) -> str:
    """The application of a model's groups, of the cluster ``name``."""
    return f"{name}:{part}"


def parts_among(name: str, applications: Iterable[str]) -> list[str]:
    """The parts that the cluster ``name`` has among ``applications``."""
    return [each[len(name) + 1 :] for each in applications if each.startswith(f"{name}:")]


def known_parts(name: str, models: Iterable[str], applications: Iterable[str]) -> dict[str, str]:
    """The part of each of ``models`` that the cluster ``name`` has among ``applications``, of the
    last generation."""
    newest: dict[str, int] = {}
    for part in parts_among(name, applications):
        plain, _, generation = part.partition(":")
        newest[plain] = max(newest.get(plain, 1), int(generation or 1))
    return {
        model: part_of(model, newest[plain])
        for model in models
        if (plain := part_of(model)) in newest
    }


def deployments_of(
    name: str, applications: "Mapping[str, ApplicationStatusOverview]"
) -> "dict[str, DeploymentStatusOverview]":
    """All deployments of the cluster ``name``: its gateways, and its groups as
    ``ReplicaGroup-PART``, or ``ReplicaGroup`` where there is one part only."""
    found = dict(applications[name].deployments) if name in applications else {}
    parts = parts_among(name, applications)
    for part in parts:
        for kind, each in applications[application_of(name, part)].deployments.items():
            found[f"{kind}-{part}" if len(parts) > 1 else kind] = each
    return found


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
    """The state of each cluster's gateways, in words; of groups, where they are all that is
    left."""
    from ray import serve

    found: dict[str, str] = {}
    for name, each in sorted(serve.status().applications.items()):
        found.setdefault(name.partition(":")[0], each.status.lower().replace("_", " "))
    return found
