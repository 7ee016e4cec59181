"""The bench of a sharded directory, with few blocks and few groups."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BenchModule = Callable[[str], ModuleType]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(bench_module: BenchModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a part of the bench; returns all rows of its state."""
    state = tmp_path / "state.jsonl"

    def main(part: str, *flags: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["sharding", part, "--state", str(state), *flags])
        bench_module("sharding.__main__").main()
        return [json.loads(line) for line in state.read_text().splitlines()]

    return main


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data/traces"
    folder.mkdir(parents=True)
    names = ("mooncake_conversation_trace.jsonl", "multitenant_like.jsonl")
    for name, num_roots in zip(names, (1, 7), strict=True):
        with (folder / name).open("w") as file:
            for i in range(300):
                root = i * i % num_roots
                line = {"timestamp": 200 * i, "input_length": 1500, "output_length": 9}
                file.write(json.dumps({**line, "hash_ids": [root, 100 + i]}) + "\n")
    return tmp_path / "data"


def test_every_shard_is_filled_and_one_is_filled_again(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--blocks", "200000", "--shards", "2", "--groups", "6")
    rows = run("fill", *flags)
    assert [row["shard"] for row in rows] == [0, 1]
    # The last chain may be longer than what was left; each shard has the spread beginning too.
    assert 200_000 <= sum(row["num_blocks"] - 64 for row in rows) < 208_000
    assert ["refill_s" in row for row in rows] == [True, False]
    assert all(10 < row["bytes_per_block"] < 40 for row in rows)
    # No two shards have a chain in common, and a shard filled alone is the same.
    (*_, again) = run("fill", *flags, "--only", "1")
    assert again["num_holdings"] == rows[1]["num_holdings"]
    output = tmp_path / "report.md"
    capsys.readouterr()
    run("report", "--output", str(output))
    assert output.read_text() == capsys.readouterr().out[:-1]
    for words in ("## Shards", "Shard 0 after a restart", "| dict of groups |"):
        assert words in output.read_text()


def test_what_all_begin_with_is_spread(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("balance", "--data", str(data))
    conversation = next(row for row in rows if row["num_shards"] == 16)
    assert (conversation["root_look_ups"], conversation["num_spread"]) == (16, 1)
    assert conversation["spread_look_ups"] < 2
    run("report")
    assert "| 100.0% | 16 | 16.00 / 16.00 |" in capsys.readouterr().out


def test_looking_at_all_groups_by_other_means_changes_nothing(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("preselect", "--data", str(data), "--groups", "2")
    assert [row["num_each"] for row in rows[:2]] == [0, 4]
    # Four of two groups are all of them.
    for name in ("conversation", "multitenant"):
        means = {row["mean_s"] for row in rows if row["trace"] == name}
        assert max(means) == pytest.approx(min(means), rel=1e-9)
    run("report")
    assert "| all |" in capsys.readouterr().out
