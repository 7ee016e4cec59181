"""A small run of each benchmark on the demo model, through the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.cli.main import main
from quire.worker.bench import plot

SMALL = ("--num-requests", "6", "--prefix-len", "20", "--own-len", "6", "--output-len", "3")
SMALL_SWEEP = ("--num-prefixes", "2", "--repeats", "1", "--num-threads", "1")


def read_rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_prefix_compares_caching_on_and_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--block-sizes", "4", "16", "--cache-sizes", "35%", "100%")
    output = tmp_path / "prefix"
    assert main(["bench", "prefix", *SMALL, *SMALL_SWEEP, *sizes, "--output", str(output)]) == 0
    rows = read_rows(tmp_path / "prefix.json")
    assert [(row["cell"]["block_size"], row["cell"]["cache_size"]) for row in rows] == [
        (4, "35%"),
        (4, "100%"),
        (16, "35%"),
        (16, "100%"),
    ]
    for row in rows:
        assert row["uncached"]["hit_rate"] == 0
        assert row["cached"]["hit_rate"] <= row["infinite_hit_rate"]
        assert row["speedup"]["bound"] <= row["speedup"]["infinite_bound"]
    # Four of six requests find the 20 tokens that another one has brought, or 16 of them.
    assert rows[1]["cached"]["hit_rate"] == rows[1]["infinite_hit_rate"] == 4 * 20 / (6 * 26)
    assert rows[3]["cached"]["hit_rate"] == 4 * 16 / (6 * 26)
    shown = capsys.readouterr().out
    assert "every request's tokens are the same with and without prefix caching" in shown
    assert ("prefix.png" in shown) == plot.has_matplotlib()


@pytest.mark.slow
def test_blocksize_runs_a_workload_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({"prompt_token_ids": list(range(20)), "max_tokens": 2})
    (tmp_path / "own.jsonl").write_text(f"{line}\n" * 4)
    workload = ("--workload", str(tmp_path / "own.jsonl"))
    sizes = ("--block-sizes", "4", "8", "--repeats", "1", "--concurrency", "2")
    output = tmp_path / "sizes"
    assert main(["bench", "blocksize", *workload, *sizes, "--output", str(output)]) == 0
    rows = read_rows(tmp_path / "sizes.json")
    # All but the last token, in full blocks.
    assert [row["cached"]["hit_rate"] for row in rows] == [3 * 16 / 80, 3 * 16 / 80]
    assert "4 requests of own.jsonl" in capsys.readouterr().out


def test_default_cache_sizes_that_a_small_workload_does_not_fit_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps({"prompt_token_ids": list(range(20)), "max_tokens": 2})
    (tmp_path / "own.jsonl").write_text(f"{line}\n" * 4)
    workload = ("--workload", str(tmp_path / "own.jsonl"))
    sizes = ("--block-sizes", "4", "--repeats", "1", "--output", str(tmp_path / "own"))
    assert main(["bench", "prefix", *workload, *sizes]) == 0
    assert [row["cell"]["cache_size"] for row in read_rows(tmp_path / "own.json")] == [
        "30%",
        "100%",
    ]
    assert "left out: cache size 10% is 3 blocks of 4 tokens" in capsys.readouterr().err
    # A requested part is not left out silently.
    assert main(["bench", "prefix", *workload, *sizes, "--cache-sizes", "10%"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prefix", "--cache-sizes", "some"], "cache size 'some': must be"),
        (["prefix", "--prefix-len", "2000"], "request 1 has 2030 tokens and 16 of output"),
        (["prefix", "--repeats", "0"], "repeats=0: must be 1 or more"),
        (["blocksize", "--cache-sizes", "1%"], "at least "),
        (["blocksize", "--workload", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["prefix", "--output", "/nowhere/name"], "no folder /nowhere: make it, or give another"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_plot_library_is_named_and_the_table_still_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "has_matplotlib", lambda: False)
    sizes = ("--block-sizes", "16", "--output", str(tmp_path / "sizes"))
    assert main(["bench", "blocksize", *SMALL, *SMALL_SWEEP, *sizes]) == 0
    shown = capsys.readouterr().out
    assert "no plot: that needs matplotlib (pip install matplotlib)" in shown
    assert "out tok/s" in shown


def test_help_shows_defaults_as_one_types_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "prefix", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 10% 30% 100%)" in shown
    assert "(default: quire-bench-prefix)" in shown
    assert "None" not in shown


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "prefix"
    sizes = ("--block-sizes", "4", "8", "--plot-format", suffix, "--output", str(output))
    assert main(["bench", "prefix", *SMALL, *SMALL_SWEEP, *sizes, "--cache-sizes", "100%"]) == 0
    begins = (tmp_path / f"prefix.{suffix}").read_bytes()[:5]
    assert begins == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]
