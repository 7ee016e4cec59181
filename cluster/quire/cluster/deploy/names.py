"""Names of Serve applications, with which several clusters can run on one Ray cluster.

    NAME          the gateways; the user chose the name
    NAME:MODEL    the groups of one model; MODEL is their *part* of the name
    NAME:MODEL:2  its groups of the second generation, which replace the first

Serve identifies an application by its name alone: one that is deployed under a name in use replaces
the application of that name.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from quire.worker.request.errors import ConfigError

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

# Serve uses the name in names of log files, and separates it from a deployment's by '#'.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_OTHERS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARS = 63
_DIGEST_CHARS = 8


def part_of(model: str, generation: int = 1) -> str:
    """The part of an application's name for a model's groups: the model's name with ``--`` for
    ``/``. If that is too long or ambiguous, it is cut to fit and a digest is appended."""
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
    """The name of the application of a model's groups in the cluster ``name``."""
    return f"{name}:{part}"


def parts_among(name: str, applications: Iterable[str]) -> list[str]:
    """The parts of the cluster ``name`` among ``applications``."""
    return [each[len(name) + 1 :] for each in applications if each.startswith(f"{name}:")]


def known_parts(name: str, models: Iterable[str], applications: Iterable[str]) -> dict[str, str]:
    """The newest part of each of ``models`` in the cluster ``name``, among ``applications``. Models
    without one are left out."""
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
    ``ReplicaGroup-PART``, or ``ReplicaGroup`` if there is only one part."""
    found = dict(applications[name].deployments) if name in applications else {}
    parts = parts_among(name, applications)
    for part in parts:
        for kind, each in applications[application_of(name, part)].deployments.items():
            found[f"{kind}-{part}" if len(parts) > 1 else kind] = each
    return found


def name_of_application(model_name: str, given: str | None = None) -> str:
    """The name of an application: ``given``, or one made from the model's name.

    Raises:
        ConfigError: ``given`` is not a valid name.
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
    """Raises ConfigError: the Ray cluster that this process is connected to has an application of
    this name."""
    known = _applications()
    if name in known:
        raise ConfigError(
            f"name={name!r}: this Ray cluster has an application of that name ({known[name]}); "
            "take another with --name, or stop that one first: Ctrl-C where it is served, or "
            f"`quire stop {name}`"
        )


def check_known(name: str) -> None:
    """Raises ConfigError: the Ray cluster that this process is connected to has no application of
    this name."""
    known = _applications()
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise ConfigError(
            f"name={name!r}: this Ray cluster has no such application; there are: {listed}"
        )


def _applications() -> dict[str, str]:
    """The state of each cluster in words, by name: that of its gateways, or of its groups if no
    gateways are left."""
    from ray import serve

    found: dict[str, str] = {}
    for name, each in sorted(serve.status().applications.items()):
        found.setdefault(name.partition(":")[0], each.status.lower().replace("_", " "))
    return found
