"""`requirements.lock` pins each dependency within pyproject.toml's bounds and names no index."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_each_dependency_is_locked_within_its_bounds() -> None:
    locked: dict[str, list[Version]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE):
        locked.setdefault(canonicalize_name(name), []).append(Version(version))
    extras = PROJECT["optional-dependencies"].values()
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]:
        wanted = Requirement(line)
        # An extra of another extra, and packages that belong to torch's build.
        if wanted.name in (PROJECT["name"], "triton"):
            continue
        versions = locked.get(canonicalize_name(wanted.name))
        assert versions, f"{wanted.name} is not in requirements.lock: run `make lock`"
        for version in versions:
            assert version in wanted.specifier, f"{line}, locked {version}: run `make lock`"


def test_each_version_has_hashes() -> None:
    hashed = re.findall(r"^[\w.-]+==.* \\\n    --hash=sha256:", LOCK, re.MULTILINE)
    assert len(hashed) == len(re.findall(r"^[\w.-]+==", LOCK, re.MULTILINE)) > 100


def test_no_registry_is_named() -> None:
    assert "://" not in LOCK
    assert "index-url" not in LOCK
