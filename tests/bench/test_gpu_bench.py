"""The GPU's benchmark on a CPU: that it runs, and that one failing part leaves the others."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Module = Callable[[str], ModuleType]


@pytest.mark.slow
def test_a_dry_run_checks_and_times_what_a_cpu_has(
    bench_module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench_module("gpu.run")
    assert run.main(["--check"]) == 0
    out = capsys.readouterr().out
    for text in ("decode 4 x 40", "write_kv 64", "quire, once", "decode step 3 x 40", "end to end"):
        assert text in out


def test_a_part_that_fails_is_said_and_leaves_the_others(
    bench_module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = bench_module("gpu.run")

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(run.TIMED_PARTS, "attention", broken)
    report = run.run(run.dry_scale(), ["attention", "streams"], tmp_path)
    assert report.faults == {"part attention": "RuntimeError: no such kernel"}
    assert {timing.case for timing in report.timings} == {"write_kv 1", "write_kv 64"}
    (written,) = tmp_path.glob("*-gpu.md")
    assert "- part attention: RuntimeError: no such kernel" in written.read_text()
    assert "| write_kv 64 | quire |" in written.read_text()


def test_a_part_that_there_is_not_is_refused(
    bench_module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_module("gpu.run").main(["--check", "--parts", "attention,nothing"])
    assert "no nothing; there are checks, attention" in capsys.readouterr().err
