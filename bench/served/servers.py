"""The servers to measure, each as its users start it, and what their processes spend.

Ours is `quire serve PATH` on the Ray that it starts, vLLM's is `vllm serve PATH`; both on the
loopback, with 4 GiB of KV cache, as in `bench.peers`. Ours is told not to guess tokens, because
random weights repeat themselves, and to admit any burst, because a refusal computes nothing.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.machine import tree
from bench.peers.peers import OURS, Engine, environment_of
from bench.peers.process import EngineFailed
from bench.servers import free_port

from quire.cluster.group.engine_loop import ENGINE_THREAD
from quire.worker.rank.process import RANK_MODULE

_KV_BYTES = 4 << 30
_START_S = 600
_STOP_S = 60
_OURS = "--name quire --grpc-port 0 --http-port 0 --no-speculation --max-queue-wait-s 600"
_VLLM_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": str(_KV_BYTES >> 30),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""That of the offline adapter (`bench/peers/adapters/vllm.py`), but for its one process."""
_ENGINE, _LOOP, _REST = "engine", "group loop", "other"
_ROLES = {
    "ServeReplica:quire:ReplicaGroup": _LOOP,
    "ServeReplica:quire:Gateway": "gateway",
    "ServeController": "controller",
    "raylet/raylet": "raylet, GCS",
    "gcs/gcs_server": "raylet, GCS",
    RANK_MODULE: _ENGINE,
    "VLLM::": _ENGINE,
    "bin/vllm": "gateway",
}
"""By a part of the command line. `other` is `quire serve` itself and Ray's dashboard, monitors and
agents; `gateway` is vLLM's API server too."""
ROLES = ("gateway", _LOOP, _ENGINE, "controller", "raylet, GCS", _REST)


class Server(NamedTuple):
    """A server that answers."""

    pid: int | None
    """The server's process ID; known only if this benchmark started it."""
    model: str
    addresses: dict[str, str]
    """Addresses by protocol: "http" and perhaps "grpc"."""


@contextlib.contextmanager
def serving(engine: Engine, checkpoint: Path, *, num_threads: int, log: Path) -> Iterator[Server]:
    """``engine``'s server, for as long as the block.

    Raises:
        EngineFailed: It ended or did not answer in time; ``log`` says why.
    """
    if engine.name == OURS:
        command = [sys.executable, "-m", "quire", "serve", str(checkpoint)]
        command += _OURS.split()
        command += ["--kv-cache-memory-bytes", str(_KV_BYTES), "--num-threads", str(num_threads)]
        environment, model = dict(os.environ), checkpoint.name
        addresses: dict[str, str] = {}
        ready = re.compile(r"gRPC\s+(?P<grpc>\S+)[\s\S]*http://(?P<http>[^/\s]+)/")
    else:
        at = f"127.0.0.1:{free_port()}"
        command = [str(Path(engine.command[0]).with_name("vllm")), "serve", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", at.rpartition(":")[2], "--dtype", "bfloat16"]
        environment = environment_of(engine, num_threads=num_threads) | _VLLM_ENVIRONMENT
        model, addresses = str(checkpoint), {"http": at}
        ready = re.compile("Application startup complete")
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        found = _wait_for(ready, process, log)
        yield Server(process.pid, model, addresses | found.groupdict())
    finally:
        _end(process)


def cpu_s(pid: int | None) -> dict[str, float]:
    """CPU seconds so far of the server ``pid``, by role."""
    spent: Counter[str] = Counter()
    if pid is None:
        return {}
    for number, ticks in tree(pid).items():
        folder = Path("/proc") / str(number)
        with contextlib.suppress(OSError):  # It has ended.
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            role = role_of(command)
            spent[role] += ticks
            if role == _LOOP:
                engine = sum(map(_engine_ticks, folder.glob("task/*/stat")))
                spent[_LOOP] -= engine
                spent[_ENGINE] += engine
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return {role: spent[role] * tick_s for role in (*ROLES, *spent)}


def role_of(command: str) -> str:
    return next((role for part, role in _ROLES.items() if part in command), _REST)


def _engine_ticks(stat: Path) -> int:
    with contextlib.suppress(OSError):
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        if name == ENGINE_THREAD:
            return sum(map(int, rest.split()[11:13]))
    return 0


def _wait_for(ready: re.Pattern[str], process: subprocess.Popen[bytes], log: Path) -> re.Match[str]:
    deadline_s = time.monotonic() + _START_S
    while (found := ready.search(log.read_text())) is None:
        if process.poll() is not None:
            raise EngineFailed(f"the server ended; {log} ends:\n{log.read_text()[-1500:]}")
        if time.monotonic() > deadline_s:
            raise EngineFailed(f"the server did not answer in {_START_S} s; its log is {log}")
        time.sleep(0.2)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server as Ctrl-C does, and kills what it leaves."""
    started = tree(process.pid)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
        return
    for number in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()
