"""Fetch the named Debian packages and check that they are the recorded ones."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import TypedDict

SOURCES = Path(__file__).with_name("sources.json")


class Package(TypedDict):
    """One entry of sources.json."""

    name: str
    version: str
    sha256: str
    licence: str
    used_for: str


def fetch(folder: Path) -> dict[str, Path]:
    """Download and unpack every package of sources.json; return the unpacked folders.

    A package that does not have the recorded SHA-256 is refused: the training text has to be
    the same text on every machine.
    """
    packages: list[Package] = json.loads(SOURCES.read_text())["packages"]
    folder.mkdir(parents=True, exist_ok=True)
    unpacked: dict[str, Path] = {}
    for package in packages:
        name, version = package["name"], package["version"]
        target = folder / name
        if not target.exists():
            subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=folder, check=True)
            (archive,) = folder.glob(f"{name}_*.deb")
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            if digest != package["sha256"]:
                raise ValueError(f"{archive.name} has SHA-256 {digest}, not the recorded one")
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)
        unpacked[name] = target
    return unpacked
