"""Ranks that share only a network, here the loopback."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.nodes import rank_launcher
from tests.nodes.rank_launcher import decode_step

from quire import demo_model, llm
from quire.cluster.features.nodes.rank_socket import Hello, Reception, connect
from quire.cluster.features.nodes.remote_rank import RemoteRankTask
from quire.cluster.features.nodes.remote_ranks import ProcessStarter, RemoteRanks
from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams
from quire.worker.rank import lockstep
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError, RankFailure
from quire.worker.step.messages import StepInput

pytestmark = pytest.mark.slow

HERE: tuple[str, Any] = ("127.0.0.1", list)
HELLO = Hello(rank=3, pid=1, host="127.0.0.1", store_port=None)

needs_native = pytest.mark.skipif(
    native.library() is None, reason="there is no native library on this machine"
)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"dtype": "bfloat16"}),
        (2, {"dtype": "bfloat16", "async_scheduling": True}),
        (4, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ],
)
def test_tokens_are_those_of_one_rank(
    ranks: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled in bfloat16, so equal tokens show that all logits had equal bits."""
    params = SamplingParams(
        temperature=1.2,
        seed=11,
        max_tokens=40,
        ignore_eos=True,
        min_tokens=4,
        logprobs=1,
        frequency_penalty=0.4,
    )
    options: dict[str, Any] = {"num_blocks": 256, "num_threads": 1} | settings
    options["max_num_batched_tokens"] = 128

    def tokens(engine: LLM) -> list[list[int]]:
        outputs = engine.generate(demo_model.QUESTIONS[:8], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(demo_model.PATH, **options) as one_rank:
        expected = tokens(one_rank)
    monkeypatch.setattr(
        llm, "make_executor", lambda config: rank_launcher.make_executor(config, [HERE, HERE])
    )
    with LLM(demo_model.PATH, tensor_parallel_size=ranks, **options) as across:
        assert tokens(across) == expected


@pytest.fixture
def start(tiny_llama: Path) -> Iterator[Callable[..., LockstepExecutor]]:
    """Starts groups of two ranks on two nodes; after the test, asserts that none is left."""
    executors: list[LockstepExecutor] = []
    starters: list[LeavingProcesses] = []

    def make(**fields: Any) -> LockstepExecutor:
        small: dict[str, Any] = {"num_blocks": 128, "step_timeout_s": 120.0, "num_threads": 1}
        config = EngineConfig(
            model=tiny_llama, tensor_parallel_size=2, device="cpu", **small | fields
        )
        starters.append(LeavingProcesses([HERE, HERE]))
        executors.append(executor_of(config, starters[-1]))
        return executors[-1]

    yield make
    for executor in executors:
        executor.close()
    for starter in starters:
        for process in starter.processes:
            process.wait(timeout=120)


def executor_of(config: EngineConfig, starter: ProcessStarter) -> LockstepExecutor:
    return LockstepExecutor(config, RemoteRanks(starter, num_nodes=2, host=HERE[0]))


class LeavingProcesses(rank_launcher.NodeProcesses):
    """A starter that never kills ranks, so that they must end by themselves."""

    def release(self) -> None:
        pass


@pytest.mark.slow
def test_a_killed_rank_fails_the_group_by_name(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_SETTLE_S", 60)  # On a slow machine a death may take its time.
    executor = start()
    step(executor)
    pid = executor.pids[1]
    os.kill(pid, signal.SIGKILL)
    message = rf"rank 1 \(pid {pid} on 127\.0\.0\.1\) (hung up|was cut off)"
    with pytest.raises(RankFailure, match=message):
        step(executor)
    with pytest.raises(RankFailure, match=message):
        step(executor)


@pytest.mark.slow
def test_a_hung_rank_fails_the_group_after_the_deadline(start: Any) -> None:
    executor = start(step_timeout_s=0.5)
    pid = executor.pids[1]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankFailure, match=r"not answer within 0\.5 s; .* rank 1 acknowledges"):
        step(executor)
    os.kill(pid, signal.SIGCONT)  # Resumed, it notices that its executor is gone.


@pytest.mark.slow
def test_what_a_rank_raises_arrives_with_its_traceback(start: Any) -> None:
    executor = start(async_scheduling=True)
    message = r"rank \d \(pid \d+ on .*\) raised IndexError: index out"
    executor.submit(_step(token_id=999_999))
    executor.submit(_step())  # Unread, it must not stand in the message's way.
    with pytest.raises(RankFailure, match=message) as raised:
        executor.result()
    assert any("model.py" in note for note in raised.value.__notes__)


@pytest.mark.slow
def test_what_a_rank_refuses_is_refused_here(start: Any) -> None:
    with pytest.raises(ConfigError, match="num_blocks=3"):
        start(num_blocks=3)


SCRIPT = """
import sys, time
from pathlib import Path
from tests.nodes import rank_launcher
from tests.nodes.rank_launcher import decode_step
from quire.worker.request.config import EngineConfig
config = EngineConfig(model=Path(sys.argv[1]), tensor_parallel_size=2, device="cpu",
                      num_blocks=64, num_threads=1)
executor, _ = rank_launcher.make_executor(config, 2 * [("127.0.0.1", list)])
print(*executor.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_of_a_killed_executor_end_with_it(tiny_llama: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tiny_llama)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2
        script.kill()
    deadline = time.monotonic() + 120
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "a rank outlives its executor"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process runs. Zombies do not count, since init may not reap them here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_cannot_come_is_not_waited_for(tiny_llama: Path) -> None:
    class Nothing:
        released = False

        def start(self, tasks: Sequence[RemoteRankTask]) -> None:
            pass

        def why_not(self, rank: int) -> str | None:
            return "its node is gone" if rank == 1 else None

        def release(self) -> None:
            self.released = True

    starter = Nothing()
    config = EngineConfig(model=tiny_llama, tensor_parallel_size=2)
    with pytest.raises(RankFailure, match="rank 1 did not start: its node is gone"):
        executor_of(config, starter)
    assert starter.released


class Bomb:
    """An object that ends the test run when it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_who_has_no_key_is_turned_away_unread(caplog: pytest.LogCaptureFixture) -> None:
    reception = Reception("127.0.0.1")
    with socket.create_connection(reception.address) as stranger:
        connection = Connection(os.dup(stranger.fileno()))
        connection.send_bytes(pickle.dumps(Bomb()))
        assert reception.accept(wait_s=60) is None
        connection.close()
    assert "turned away 127.0.0.1: AuthenticationError" in caplog.text
    with socket.create_connection(reception.address):
        pass  # A peer that disconnects at once does no harm either.
    assert reception.accept(wait_s=60) is None
    reception.close()


def test_a_rank_wants_to_see_the_key_too() -> None:
    """A process that takes over an executor's address must not be able to send ranks messages."""
    with (
        socket.create_server(("127.0.0.1", 0)) as impostor,
        ThreadPoolExecutor(1) as pool,
    ):
        coming = pool.submit(connect, impostor.getsockname(), b"key", HELLO)
        accepted, _ = impostor.accept()
        with Connection(accepted.detach()) as connection:
            connection.send_bytes(b"#CHALLENGE#" + bytes(20))
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            connection.recv_bytes()
            connection.send_bytes(b"no digest")
            with pytest.raises(AuthenticationError):
                coming.result()


def test_who_has_the_key_is_let_in() -> None:
    reception = Reception("127.0.0.1")
    assert reception.accept(wait_s=0.01) is None
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(connect, reception.address, reception.key, HELLO)
        rank = reception.accept(wait_s=60)
        reception.close()
        assert rank is not None
        assert (rank.number, rank.pid, rank.host) == (HELLO.rank, HELLO.pid, HELLO.host)
        assert rank.how_it_died() is None
        with coming.result() as connection:
            connection.send_bytes(b"one")
            assert rank.connection.recv_bytes() == b"one"
            connection.send_bytes(b"two")
        assert rank.how_it_died() is None  # The second message has not been read yet.
        assert rank.connection.recv_bytes() == b"two"
        while (how := rank.how_it_died()) is None:  # Until the kernel has delivered it.
            time.sleep(0.01)
        assert how == "hung up"
        rank.connection.close()


def step(executor: LockstepExecutor) -> None:
    executor.submit(_step())
    executor.result()


def _step(*, token_id: int = 5) -> StepInput:
    """One token of one sequence."""
    return replace(
        decode_step(1, num_blocks=1),
        token_ids_T=np.full(1, token_id, np.int64),
        seq_lens_B=np.ones(1, np.int32),
    )
