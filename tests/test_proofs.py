"""A long test is left out only while everything on which it depends is as it was when it passed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import proofs

TESTS = """\
import numpy
from quire.kernels import ops


def test_it() -> None:
    import tools.helper
"""


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of tests in a repository of its own, whose ledger holds its digest."""
    for name, text in {
        "tests/kernels/test_it.py": TESTS,
        "tests/kernels/conftest.py": "",
        "tools/helper.py": "",
        "tools/other.py": "",
        "kernels/quire/kernels/ops.py": "from quire.kernels import deeper",
        "kernels/quire/kernels/deeper.py": "",
        "kernels/quire/kernels/native/sum.cpp": "",
        "kernels/quire/kernels/native/sum.h": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    monkeypatch.setattr(proofs, "LEDGER", tmp_path / "tests" / "proofs.json")
    roots = [tmp_path, *(tmp_path / root.name for root in proofs.SOURCE_ROOTS[1:])]
    monkeypatch.setattr(proofs, "SOURCE_ROOTS", roots)
    forget()
    file = tmp_path / "tests" / "kernels" / "test_it.py"
    proofs.main("write", str(file))
    forget()
    yield file
    forget()


def forget() -> None:
    for cached in (proofs.digest, proofs._module, proofs._ledger):
        cached.cache_clear()


def test_tests_that_passed_are_proven(tests: Path) -> None:
    assert proofs.holds(tests)
    assert proofs.main("holds", str(tests)) == 0


@pytest.mark.parametrize(
    "changed",
    [
        "tests/kernels/test_it.py",
        "tests/kernels/conftest.py",
        "tools/helper.py",
        "kernels/quire/kernels/ops.py",
        "kernels/quire/kernels/deeper.py",
        "kernels/quire/kernels/native/sum.cpp",
        "kernels/quire/kernels/native/sum.h",
    ],
)
def test_a_change_of_what_they_import_ends_a_proof(tests: Path, changed: str) -> None:
    with (proofs.ROOT / changed).open("a") as file:
        file.write("\n")
    assert not proofs.holds(tests)
    assert proofs.main("holds", str(tests)) == 1


def test_a_change_elsewhere_does_not(tests: Path) -> None:
    (proofs.ROOT / "tools" / "other.py").write_text("x = 1\n")
    assert proofs.holds(tests)


def test_another_version_of_a_package_ends_a_proof(
    tests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_version", lambda package: f"{package} 0.0")
    assert not proofs.holds(tests)


def test_another_compiler_ends_a_proof(tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "_compiler", lambda: "c++ 0.0")
    assert not proofs.holds(tests)


def test_tests_under_sanitizers_are_a_proof_of_their_own(tests: Path) -> None:
    assert not proofs.holds(tests, "-fsanitize=address")
    proofs.main("write", "-fsanitize=address", str(tests))
    forget()
    assert proofs.holds(tests, "-fsanitize=address")
    assert proofs.holds(tests)


def test_the_ledger_forgets_files_that_are_gone(tests: Path) -> None:
    other = tests.with_name("test_other.py")
    other.touch()
    tests.unlink()
    proofs.main("write", str(other))
    assert list(json.loads(proofs.LEDGER.read_text())) == ["tests/kernels/test_other.py"]


def test_some_proven_tests_run_all_the_same_and_others_at_another_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"tests/kernels/test_it.py::test_it[{number}]" for number in range(1000)]
    drawn = []
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setattr(proofs, "_commit", lambda commit=commit: commit)
        drawn.append({name for name in names if proofs.is_drawn(name)})
    assert all(20 < len(each) < 90 for each in drawn)
    assert drawn[0] != drawn[1]
