"""The build of the native library, and the fallback where it cannot be built."""

import ctypes
import logging
import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire import native_build
from quire.kernels.backend import backend_for
from quire.kernels.native import library as native


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty build cache, with the library not yet loaded."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QUIRE_NATIVE", "QUIRE_NATIVE_ISA", "CXX"):
        monkeypatch.delenv(name, raising=False)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles within moments."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    (sources / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    monkeypatch.setattr(native, "_SOURCES", sources)
    return sources


def _ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Our own log records; leftovers of earlier tests may log too."""
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


def test_there_are_as_many_compilers_as_cores_and_none_outlives_an_interruption(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a real one, this compiler works in a child of its own, which says that it runs."""
    compiler, begun, lives = (tmp_path / name for name in ("c++", "begun", "lives"))
    os.mkfifo(begun)
    os.mkfifo(lives)
    compiler.write_text(
        f"#!/bin/sh\n[ $1 = --version ] || (echo >{begun}; sleep 20; echo >&0) <>{lives}\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for number in range(5):
        (small_source / f"{number}.cpp").touch()
    num_begun = 0

    def interrupted(*_: object) -> None:
        nonlocal num_begun
        while num_begun < 2:
            num_begun += len(begun.read_bytes())
        raise KeyboardInterrupt

    monkeypatch.setattr(select, "select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native.build("avx2")
    assert num_begun == 2
    with os.fdopen(os.open(lives, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        os.set_blocking(reader.fileno(), True)
        assert not reader.read(), "the child was ended, and wrote nothing"


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


def test_a_wheel_s_library_is_taken_without_a_compiler_while_the_sources_are_its_own(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "wheel"
    monkeypatch.setattr(native_build, "PREBUILT", wheel)
    compiled = native.build("portable")
    wheel.mkdir()
    brought = compiled.rename(wheel / compiled.name)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.build("portable") == brought
    (small_source / "answer.h").write_text("#define ANSWER 43\n")
    with pytest.raises(native_build.BuildError, match="no-such-compiler"):
        native.build("portable")


def test_a_wheel_s_library_is_not_taken_for_other_flags(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "PREBUILT", tmp_path / "cache")
    brought = native.build("portable")
    monkeypatch.setattr(native, "_FLAGS", ("-O1", "-fPIC"))
    assert native.build("portable") != brought


def test_what_is_compiled_at_first_use_is_said_once(
    small_source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        library = native.build("portable")
        native.build("portable")
    (record,) = _ours(caplog)
    assert record.getMessage().startswith("compiled in ")
    assert str(library) in record.getMessage()


def test_a_library_that_others_can_write_is_compiled_again(
    small_source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = native.build("portable")
    assert not library.stat().st_mode & 0o022
    assert not library.parent.stat().st_mode & 0o022
    library.write_bytes(b"planted")
    library.chmod(0o775)
    assert _answer(native.build("portable")) == 42
    assert f"{library} is not only ours to write" in caplog.text


def test_a_cache_of_ours_that_others_can_write_is_closed_to_them(small_source: Path) -> None:
    cache = small_source.parent / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    assert native.build("portable").parent == cache
    assert not cache.stat().st_mode & 0o022


def test_a_cache_that_is_somebody_else_s_to_write_is_not_used(
    small_source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = native.build("portable")
    library.parent.chmod(0o777)
    library.write_bytes(b"planted")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert _answer(native.build("portable")) == 42
    assert library.read_bytes() == b"planted"
    assert "set QUIRE_CACHE_DIR to a folder of yours" in caplog.text
