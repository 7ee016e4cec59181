"""What Quire uses of other packages that they have not promised to keep.

A version that lacks such a name is found out when it is loaded, and the error says which versions
were tested. `quire.cluster.deploy.ray_private` and `quire.cluster.edge.uvicorn_private` list the
names.
"""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from quire.worker.api.errors import ConfigError


def unknown_version(
    package: str, missing: Iterable[str], *, tested: tuple[str, str], install: str
) -> ConfigError:
    """The error of a version of ``package`` that lacks ``missing``.

    Args:
        tested: The lowest and the highest version that Quire was tested with.
        install: What pip is to install instead.
    """
    return ConfigError(f"{_lacks(package, missing)}, which Quire needs; {_remedy(tested, install)}")


def known_loss(
    package: str, missing: str, loss: str, *, tested: tuple[str, str], install: str
) -> str:
    """The warning where Quire does without ``missing``, and ``loss`` says what then is worse."""
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
