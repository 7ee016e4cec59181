"""Each benchmark, small, on the demo model, as the command line runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.cli.main import main
from quire.worker.bench import plot
from quire.worker.engine import Engine
from quire.worker.ranks.executor import InProcessExecutor
from quire.worker.step.messages import StepInput

SMALL = ("--num-requests", "6", "--prefix-len", "20", "--own-len", "6", "--output-len", "3")
SMALL_SWEEP = ("--num-prefixes", "2", "--repeats", "1", "--num-threads", "1")


def read_rows(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


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
    # One that was asked for is not left out without a word.
    assert main(["bench", "prefix", *workload, *sizes, "--cache-sizes", "10%"]) == 2


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_step_says_where_the_time_goes(num_ranks: int, tmp_path: Path) -> None:
    step = Engine.step
    flags = ("--batches", "1", "3", "--context", "8", "--chunk", "16", "--steps", "5")
    output = ("--output", str(tmp_path / "step"), "-tp", str(num_ranks))
    assert main(["bench", "step", *flags, *output]) == 0
    rows = read_rows(tmp_path / "step.json")
    if num_ranks == 2:
        messages = rows.pop()
        assert messages["kind"] == "a step of 3 decodes to 2 ranks without a model, and back"
        assert messages["step"]["median_us"] > 0
    kinds = ["1 decode", "3 decodes", "prefill 16"]
    assert [(row["kind"], row["is_async"]) for row in rows] == [
        (kind, is_async) for is_async in (False, True) for kind in kinds
    ]
    for row in rows:
        parts = row["parts"]
        assert {"schedule", "input preparation", "rank 0: model forward"} <= set(parts)
        assert ("write step" in parts) == ("wake ranks" in parts) == (num_ranks == 2)
        assert all(part["median_us"] >= 0 for part in parts.values())
        assert row["step"]["median_us"] > 0
    assert Engine.step is step


@pytest.mark.parametrize("num_shared", [0, 2])
def test_steps_decode_behind_blocks_that_are_the_same(
    num_shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepInput] = []
    submit = InProcessExecutor.submit

    def keep(self: InProcessExecutor, step: StepInput) -> None:
        steps.append(step)
        submit(self, step)

    monkeypatch.setattr(InProcessExecutor, "submit", keep)
    flags = ["--batches", "3", "--context", "43", "--chunk", "4", "--steps", "3"]
    flags += ["--shared-context", str(16 * num_shared), "--output", str(tmp_path / "step")]
    assert main(["bench", "step", *flags]) == 0
    assert json.loads((tmp_path / "step.json").read_text())["shared_context"] == 16 * num_shared
    tables = [step.block_tables_BM for step in steps if step.num_decodes == 3]
    assert len(tables) > 3
    for table_BM in tables:
        # Two full blocks behind which the rest of the 43 tokens is each one's own.
        num_different = [len(set(column)) for column in table_BM.T.tolist()]
        assert num_different[:3] == [1] * num_shared + [3] * (3 - num_shared)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prefix", "--cache-sizes", "some"], "cache size 'some': must be"),
        (["prefix", "--prefix-len", "2000"], "request 1 has 2030 tokens and 16 of output"),
        (["prefix", "--repeats", "0"], "repeats=0: must be 1 or more"),
        (["blocksize", "--cache-sizes", "1%"], "at least "),
        (["blocksize", "--workload", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["prefix", "--output", "/nowhere/name"], "no folder /nowhere: make it, or give another"),
        (["step", "--context", "1000"], "the model was trained for 1024: lower them"),
        (["step", "--shared-context", "20"], "shared_context=20: must be full blocks, a multiple"),
        (["step", "--shared-context", "256"], "and less than context=256"),
        (["step", "--batches", "0"], "batches=(0,): at least one, each 1 or more"),
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


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "prefix"
    sizes = ("--block-sizes", "4", "8", "--plot-format", suffix, "--output", str(output))
    assert main(["bench", "prefix", *SMALL, *SMALL_SWEEP, *sizes, "--cache-sizes", "100%"]) == 0
    begins = (tmp_path / f"prefix.{suffix}").read_bytes()[:5]
    assert begins == {"png": b"\x89PNG\r", "svg": b"<?xml"}[suffix]
