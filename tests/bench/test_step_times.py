"""`python -m bench.step_times`: a small run on the demo model."""

import json
from pathlib import Path

import pytest
from bench import step_times

from quire.simulate.fit import fit_cost
from quire.worker.rank.executor import InProcessExecutor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.step.messages import StepInput


@pytest.mark.slow
def test_what_is_timed_can_be_fitted(tmp_path: Path) -> None:
    flags = ("--batches", "1", "3", "--context", "8", "--chunk", "256", "--steps", "5")
    assert step_times.main([*flags, "--output", str(tmp_path / "steps")]) == 0
    rows = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert [(row["kind"], row["is_async"]) for row in rows] == [
        (kind, is_async)
        for is_async in (False, True)
        for kind in ("1 decode", "3 decodes", "prefill 256")
    ]
    assert all(row["step"]["median_us"] > 0 for row in rows)
    assert fit_cost([tmp_path / "steps.json"], num_cache_tokens=1000).num_cache_tokens == 1000


@pytest.mark.quick_cells(1)
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
    assert step_times.main(flags) == 0
    assert json.loads((tmp_path / "step.json").read_text())["shared_context"] == 16 * num_shared
    tables = [step.block_tables_BM for step in steps if step.num_decodes == 3]
    assert len(tables) > 3
    for table_BM in tables:
        # Two full blocks are shared; the rest of the 43 tokens differs.
        num_different = [len(set(column)) for column in table_BM.T.tolist()]
        assert num_different[:3] == [1] * num_shared + [3] * (3 - num_shared)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batches": (0,)}, "must be 1 or more"),
        ({"num_steps": 0}, "must be 1 or more"),
        ({"shared_context": 256}, "must be less than context=256"),
        ({"shared_context": 20}, "must be full blocks, a multiple of block_size=16"),
    ],
)
def test_steps_that_cannot_be_timed_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_times.Steps(**wrong).engine(EngineConfig(model="any"))  # type: ignore[arg-type]
