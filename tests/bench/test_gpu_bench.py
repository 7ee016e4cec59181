"""The GPU benchmark on a CPU: it runs, and a failing part does not stop the others."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Module = Callable[[str], ModuleType]


@pytest.mark.slow
def test_a_dry_run_checks_and_times_what_a_cpu_has(
    bench_module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench_module("gpu.run")
    parts = "probe,ceilings,model,products,invariance,attention,linear,streams,shared,check"
    assert run.main(["--check", "--parts", parts]) == 0
    out = capsys.readouterr().out
    for text in (
        *("decode 4 x 40", "write_kv 64", "quire, once", "decode step 3 x 40", "end to end"),
        *("prefill step 6 after 40", "| invariance | logits of a prompt of 24 in two chunks"),
        *("full run, kv, GiB", "linear lm_head 3"),
    ):
        assert text in out


def test_a_part_that_dies_is_said_with_its_case_and_leaves_the_others(
    bench_module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = bench_module("gpu.run")
    script = tmp_path / "part.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom bench.gpu.lines import Lines\n"
        "lines = Lines(Path(sys.argv[2]), sys.argv[1])\n"
        "lines.begin('decode 1 x 8')\n"
        "if sys.argv[1] == 'attention':\n    raise RuntimeError('an illegal memory access')\n"
        "lines.fact('answer', 42)\n"
    )
    monkeypatch.setattr(
        run, "_command", lambda name, folder, is_dry: [sys.executable, script, name, str(folder)]
    )
    parts = tuple(part for part in run.PARTS if part.name in ("attention", "streams"))
    run.run(parts, tmp_path / "out", budget_s=600, is_dry=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "gpu.jsonl").read_text().splitlines()]
    (fault,) = [line for line in lines if line["kind"] == "fault"]
    assert fault["what"] == "the part, in decode 1 x 8"
    assert "an illegal memory access" in fault["fault"]
    assert [line["outcome"] for line in lines if line["kind"] == "part"] == [
        "failed in decode 1 x 8",
        "done",
    ]
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "Faults: 1." in page
    assert "| streams | answer | 42 |" in page


def test_a_part_beyond_its_limit_is_stopped_with_what_it_started(
    bench_module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = bench_module("gpu.run")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(run, "_command", lambda *_: command)
    part = run.Part("attention", "", 0.5)
    run.run((part,), tmp_path, budget_s=600, is_dry=True)
    assert "| stopped after 0 s |" in (tmp_path / "gpu.md").read_text()


def test_what_no_longer_fits_the_budget_is_said(bench_module: Module, tmp_path: Path) -> None:
    run = bench_module("gpu.run")
    run.run(run.PARTS[:2], tmp_path, budget_s=0, is_dry=True)
    assert (tmp_path / "gpu.md").read_text().count("left out: 0 s were left") == 2


def test_the_full_run_fits_an_h100_and_a_larger_one_is_refused(bench_module: Module) -> None:
    shapes = bench_module("gpu.shapes")
    scale = shapes.full_scale()
    h100 = int(79.65 * 2**30)
    assert 40 * 2**30 < shapes.check_fits(scale, h100) < 0.97 * h100

    class Large(shapes.Scale):  # type: ignore[name-defined, misc]
        num_blocks = 40_000

    large = Large(device=scale.device, is_dry=False, cases=scale.cases)
    with pytest.raises(shapes.DoesNotFit, match=r"needs .* GiB .*kv 78.13.* lower"):
        shapes.check_fits(large, h100)


def test_a_part_that_there_is_not_is_refused(
    bench_module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_module("gpu.run").main(["--check", "--parts", "attention,nothing"])
    assert "no nothing; there are probe, ceilings" in capsys.readouterr().err
