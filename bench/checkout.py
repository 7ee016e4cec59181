"""Runs another checkout of Quire alone, with the packages that are installed here.

PYTHONPATH would not do: in checkouts without ``worker/quire/__init__.py``, `quire` is a namespace
package, and the regular package of the checkout that is installed here comes before it.
"""

import hashlib
import subprocess
import sysconfig
import venv
from pathlib import Path

from bench.provenance import PARTS


def interpreter_of(checkout: Path, folder: Path) -> str:
    """The Python of an environment, made below ``folder``, that imports Quire from ``checkout``.

    Raises:
        SystemExit: It is no checkout of Quire, or Quire is imported from elsewhere.
    """
    there = checkout.resolve()
    if not (there / "worker").is_dir():
        raise SystemExit(f"{there} is no checkout of Quire: it has no folder worker")
    home = folder.absolute() / f"checkout-{hashlib.sha256(str(there).encode()).hexdigest()[:8]}"
    venv.create(home, with_pip=False, clear=True, symlinks=True)
    paths = [*(str(there / part) for part in PARTS), sysconfig.get_path("purelib")]
    packages = next(home.glob("lib/python*/site-packages"))
    # The last path's own .pth files, one of which names this checkout, are not read.
    (packages / "checkout.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    python = str(home / "bin" / "python")
    asked = [python, "-P", "-c", "import quire.llm; print(quire.llm.__file__)"]
    found = subprocess.run(asked, env={}, stdout=subprocess.PIPE, text=True, check=True).stdout
    if not Path(found.strip()).is_relative_to(there):
        raise SystemExit(f"{python} imports {found.strip()}, not Quire in {there}")
    return python
