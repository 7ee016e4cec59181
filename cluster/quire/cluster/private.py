"""Errors and warnings about private parts of other packages that Quire uses.

A package may remove such a part in any version. This is noticed when the package is loaded, and the
message names the tested versions. `quire.cluster.deploy.ray_private` and
`quire.cluster.features.guard.uvicorn_private` list the parts.
"""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from quire.worker.request.errors import ConfigError


def unknown_version(
    package: str, missing: Iterable[str], *, tested: tuple[str, str], install: str
) -> ConfigError:
    """The error for an installed version of ``package`` that lacks the names ``missing``.

    Args:
        tested: The lowest and the highest version that Quire was tested with.
        install: The requirement for pip that the message recommends.
    """
    return ConfigError(f"{_lacks(package, missing)}, which Quire needs; {_remedy(tested, install)}")


def known_loss(
    package: str, missing: str, loss: str, *, tested: tuple[str, str], install: str
) -> str:
    """The warning for a missing name that Quire can do without; ``loss`` says what gets worse."""
    return f"{_lacks(package, [missing])}: {loss}; {_remedy(tested, install)}"


def _lacks(package: str, missing: Iterable[str]) -> str:
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = "(of unknown version)"
    return f"{package} {installed} has no {', '.join(f'`{name}`' for name in missing)}"


def _remedy(tested: tuple[str, str], install: str) -> str:
    versions = " to ".join(dict.fromkeys(tested))
    return f"Quire was tested with {versions}: pip install '{install}'"
