"""The benchmark of single routing decisions: a small run."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BenchModule = Callable[[str], ModuleType]


@pytest.mark.slow
def test_each_way_is_timed_by_the_number_of_groups(
    bench_module: BenchModule,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    checkout, output = Path(__file__).parents[2], tmp_path / "report.md"
    flags = ["--groups", "3", "30", "--rounds", "1", "--decisions", "20"]
    flags += ["--beside", str(checkout), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["decisions", *flags])
    bench_module("decisions").main()
    text = output.read_text()
    assert capsys.readouterr().out == text + "\n"
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| 3 ", "| 30 "))]
    ways = [(row[0].removeprefix("| "), row[1]) for row in rows]
    assert ways == [(n, way) for n in ("3", "30") for way in ("now", "before")]
    for row in rows:
        for cell in row[2:]:
            p50, p99 = (float(number.strip(" |").replace(",", "")) for number in cell.split(" / "))
            assert 0 < p50 <= p99
