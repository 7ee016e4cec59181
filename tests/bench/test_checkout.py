"""Another checkout of Quire is measured alone."""

import subprocess
from pathlib import Path

import pytest
from bench.checkout import interpreter_of


def checkout(folder: Path) -> Path:
    """One from before `quire` was a regular package."""
    package = folder / "worker" / "quire"
    package.mkdir(parents=True)
    (package / "llm.py").write_text("")
    return folder


def test_another_checkout_hides_the_one_that_is_installed(tmp_path: Path) -> None:
    there = checkout(tmp_path / "there")
    python = interpreter_of(there, tmp_path)
    asked = "import quire.llm, numpy; print(*quire.__path__, quire.llm.__file__, sep='\\n')"
    told = subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True)
    own = there / "worker" / "quire"
    assert told.stdout.splitlines() == [str(own), str(own / "llm.py")]


def test_what_is_no_checkout_or_cannot_be_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no checkout of Quire: it has no folder worker"):
        interpreter_of(tmp_path, tmp_path)
    elsewhere = checkout(tmp_path / "elsewhere")
    there = tmp_path / "there"
    there.mkdir()
    (there / "worker").symlink_to(elsewhere / "worker")
    (there / "worker" / "quire" / "__init__.py").write_text(f"__path__ = [{str(tmp_path)!r}]\n")
    (tmp_path / "llm.py").write_text("")
    with pytest.raises(SystemExit, match=r"imports .*, not Quire in"):
        interpreter_of(there, tmp_path)
