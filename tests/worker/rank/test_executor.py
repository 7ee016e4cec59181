"""Rank processes: their results, and that none outlives a fault, a close or its parent."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.worker.rank import lockstep
from quire.worker.rank.executor import InProcessExecutor, make_executor
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.rank.process import RankProcess, RankProcesses
from quire.worker.request.errors import ConfigError, RankFailure

ConfigOf = Callable[..., Any]
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, 320, n)] for n in (1, 16, 17, 40)]


@pytest.fixture
def start(config_of: ConfigOf, tiny_llama: Path) -> Iterator[Callable[..., LockstepExecutor]]:
    """Starts groups of two ranks; after the test, asserts that nothing is left of them."""
    started: list[LockstepExecutor] = []

    def make(**fields: Any) -> LockstepExecutor:
        config = config_of(tiny_llama, tensor_parallel_size=2, **fields)
        started.append(LockstepExecutor(config, RankProcesses()))
        return started[-1]

    yield make
    for executor in started:
        executor.close()
        assert not any(map(exists, executor.pids))


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def state(pid: int) -> str | None:
    """The process state in /proc: "T" is stopped, "Z" has ended and was not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while state(pid) != "T":
        time.sleep(0.001)


def wait_until_gone(pids: Sequence[int], *, deadline_s: float = 120.0) -> None:
    deadline = time.monotonic() + deadline_s
    while left := [pid for pid in pids if state(pid) not in (None, "Z")]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_ranks_and_one_generate_what_transformers_does(
    start: Any, config_of: ConfigOf, tiny_llama: Path, oracle: Any, driver: Any
) -> None:
    with torch.no_grad():
        expected = [
            oracle(tiny_llama)
            .generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
            )[0, len(prompt) :]
            .tolist()
            for prompt in PROMPTS
        ]
    one, facts = make_executor(config_of(tiny_llama))
    assert isinstance(one, InProcessExecutor)
    assert (one.num_blocks, facts.vocab_size) == (128, 320)
    assert driver.generate(one, PROMPTS, num_tokens=20) == expected
    two = start()
    for pid in two.pids:
        os.kill(pid, signal.SIGINT)  # In terminals Ctrl-C reaches ranks too; they must ignore it.
    assert driver.generate(two, PROMPTS, num_tokens=20) == expected
    two.close()
    two.close()
    assert not any(map(exists, two.pids))
    for closed in (one, two):
        closed.close()
        with pytest.raises(RankFailure, match="the executor is closed"):
            driver.generate(closed, PROMPTS, num_tokens=1)


@pytest.fixture
def deaths_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows for slow machines, where the error could name a rank that failed in consequence."""
    monkeypatch.setattr(lockstep, "_SETTLE_S", 60)


@pytest.mark.slow
@pytest.mark.usefixtures("deaths_may_take_their_time")
def test_a_killed_rank_fails_the_group_by_name(start: Any, driver: Any) -> None:
    executor = start()
    os.kill(executor.pids[1], signal.SIGKILL)
    message = rf"rank 1 \(pid {executor.pids[1]}\) died with signal 9"
    with pytest.raises(RankFailure, match=message):
        driver.generate(executor, PROMPTS, num_tokens=50)
    assert not any(map(exists, executor.pids))
    with pytest.raises(RankFailure, match=message):
        driver.generate(executor, PROMPTS, num_tokens=1)


@pytest.mark.slow
@pytest.mark.usefixtures("deaths_may_take_their_time")
def test_a_rank_that_takes_its_time_to_die_is_named_too(
    start: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start()
    how_it_died, begin_s = RankProcess.how_it_died, time.monotonic()

    def late(rank: RankProcess) -> str | None:
        return how_it_died(rank) if time.monotonic() > begin_s + 1 else None

    monkeypatch.setattr(RankProcess, "how_it_died", late)
    os.kill(executor.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 \(pid \d+\) died with signal 9"):
        driver.generate(executor, PROMPTS, num_tokens=50)


@pytest.mark.slow
def test_two_steps_are_under_way_at_a_time_and_late_tokens_are_put_in(
    start: Any, driver: Any, row: Any
) -> None:
    executor = start(async_scheduling=True)
    assert executor.num_ahead == 1
    expected = driver.generate(executor, PROMPTS[1:2], num_tokens=2)[0]
    executor.submit(driver.step([row(PROMPTS[1], [0, 1])]))
    step = driver.step([row([*PROMPTS[1], 0], [0, 1], done=len(PROMPTS[1]))])
    zero = np.zeros(1, np.int32)
    executor.submit(replace(step, late_tokens_L=zero, late_rows_L=zero))
    assert [int(executor.result().token_ids_S[0]) for _ in range(2)] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("deaths_may_take_their_time")
def test_a_rank_that_dies_with_two_steps_under_way_fails_the_group(
    start: Any, driver: Any, row: Any
) -> None:
    executor = start(async_scheduling=True)
    stop(executor.pids[1])
    for _ in range(2):
        executor.submit(driver.step([row(PROMPTS[1], [0, 1])]))
    os.kill(executor.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"rank 1 \(pid \d+\) died with signal 9"):
        executor.result()
    assert not any(map(exists, executor.pids))


@pytest.mark.slow
def test_a_hung_rank_fails_the_group_after_the_deadline(start: Any, driver: Any) -> None:
    executor = start(step_timeout_s=0.5)
    stop(executor.pids[1])
    with pytest.raises(RankFailure, match=r"not answer within 0\.5 s; .* rank 1 stopped"):
        driver.generate(executor, PROMPTS, num_tokens=50)
    assert not any(map(exists, executor.pids))


@pytest.mark.slow
def test_what_a_rank_raises_arrives_with_its_traceback(start: Any, driver: Any) -> None:
    executor = start()
    with pytest.raises(RankFailure, match=r"rank \d \(pid \d+\) raised IndexError: index out") as e:
        driver.generate(executor, [[999_999]], num_tokens=1)
    assert any("model.py" in note for note in e.value.__notes__)


def test_an_exception_in_this_process_fails_the_group_too(
    config_of: ConfigOf, tiny_llama: Path, driver: Any
) -> None:
    executor, _ = make_executor(config_of(tiny_llama))
    with pytest.raises(RankFailure, match="rank 0 raised IndexError"):
        driver.generate(executor, [[999_999]], num_tokens=1)


@pytest.mark.slow
def test_settings_that_a_rank_refuses_are_refused_here_in_the_same_words(
    config_of: ConfigOf, tiny_llama: Path
) -> None:
    messages = []
    for size in (1, 2):
        with pytest.raises(ConfigError) as caught:
            make_executor(config_of(tiny_llama, num_blocks=3, tensor_parallel_size=size))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


SCRIPT = """
import sys, time
from quire.worker.request.config import EngineConfig
from quire.worker.rank.executor import make_executor
executor, _ = make_executor(EngineConfig(
    model=sys.argv[1], tensor_parallel_size=2, device="cpu", num_blocks=64, num_threads=1))
print(*executor.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"], ids=["memory", "gloo"])
def test_a_killed_script_leaves_neither_ranks_nor_files(
    tiny_llama: Path, tmp_path: Path, native: str
) -> None:
    """The script has no ``__main__`` guard and runs where its imports could not be found."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "torch.py").write_text("raise ImportError('from the working directory')")
    (tmp_path / "elsewhere").mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "script.py").rename(tmp_path / "elsewhere" / "script.py")
    script = subprocess.Popen(
        [sys.executable, str(tmp_path / "elsewhere" / "script.py"), str(tiny_llama)],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(temporary),
            "QUIRE_NATIVE": native,
        },
    )
    try:
        assert script.stdout is not None
        assert select.select([script.stdout], [], [], 300)[0]
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(exists, pids))
    finally:
        script.kill()
        script.communicate()
    wait_until_gone(pids)
    assert not list(temporary.iterdir())


class OnTwoNodes(RankProcesses):
    num_nodes = 2


def test_ranks_of_several_nodes_take_no_adapters(config_of: ConfigOf, tiny_llama: Path) -> None:
    config = config_of(tiny_llama, tensor_parallel_size=2, enable_lora=True)
    with pytest.raises(ConfigError, match="enable_lora=True: the ranks of a group are on 2 nodes"):
        LockstepExecutor(config, OnTwoNodes())
