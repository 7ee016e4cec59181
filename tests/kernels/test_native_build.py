"""How the native library comes to be, and that nothing breaks where it cannot."""

import ctypes
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.kernels import native
from quire.kernels.backend import backend_for


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and a library that is not yet looked for."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QUIRE_NATIVE", "QUIRE_NATIVE_ISA", "CXX"):
        monkeypatch.delenv(name, raising=False)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that compiles in no time."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    (sources / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    monkeypatch.setattr(native, "_SOURCES", sources)
    return sources


def _ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What tests before have left behind may log something too."""
    return [record for record in caplog.records if record.name.startswith("quire.")]


def _answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_without_a_compiler_everything_runs_in_pytorch_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert backend_for(torch.device("cpu")).name == "cpu"
    assert len(_ours(caplog)) == 1
    assert "no C++ compiler 'no-such-compiler'; install g++" in caplog.text


def test_a_compiler_that_fails_is_quoted(
    small_source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (small_source / "answer.cpp").write_text("#error it is not to be\n")
    assert native.library() is None
    assert "it is not to be" in caplog.text
    assert not list((small_source.parent / "cache").iterdir()), "nothing half-built is left"


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert native.library() is None
    assert "Not a directory" in caplog.text


def test_it_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_NATIVE", "0")
    assert native.library() is None
    assert backend_for(torch.device("cpu")).name == "cpu"
    assert not _ours(caplog), "it was asked for"


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_NATIVE_ISA", "avx10")
    with pytest.raises(ValueError, match=r"QUIRE_NATIVE_ISA='avx10': this CPU can run .*portable"):
        native.library()


def test_ranks_that_start_together_end_up_with_one_library(small_source: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        paths = set(pool.map(native.build, ["portable"] * 6))
    assert len(paths) == 1
    assert _answer(paths.pop()) == 42
    assert len(list((small_source.parent / "cache").iterdir())) == 1


def test_only_a_change_is_compiled_again(small_source: Path) -> None:
    first = native.build("portable")
    written = first.stat().st_mtime_ns
    assert native.build("portable") == first
    assert first.stat().st_mtime_ns == written
    (small_source / "answer.h").write_text("#define ANSWER 43\n")
    second = native.build("portable")
    assert second != first
    assert (_answer(first), _answer(second)) == (42, 43)
