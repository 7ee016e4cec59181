"""Runs an engine in a process of its own, which is paused by a signal while another is measured.

So engines need not restart for every measurement, and none takes CPU time from another.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.peers.peers import Engine, converted, environment_of
from bench.peers.workloads import Prompt


class EngineFailed(Exception):
    """The process gave no answer in time, a wrong one, or ended: the message says which."""


class EngineProcess:
    """Loads ``checkpoint``. Paused whenever no call is under way.

    ``begun`` is when it was started.
    """

    def __init__(
        self,
        engine: Engine,
        checkpoint: Path,
        *,
        dtype: str,
        num_threads: int,
        timeout_s: float,
        log: Path,
    ) -> None:
        try:
            model = converted(engine, checkpoint, dtype=dtype)
        except subprocess.CalledProcessError as error:
            raise EngineFailed(f"export ended with status {error.returncode}") from error
        self.begun = time.perf_counter()
        self.disturbance: float | None = None
        self._timeout_s = timeout_s
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                engine.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment_of(engine, num_threads=num_threads),
                cwd=log.parent,
                text=True,
                start_new_session=True,
            )
        self._machine = Machine.now(self._process.pid)
        start = {"checkpoint": str(model), "dtype": dtype, "threads": num_threads}
        try:
            self.versions: dict[str, str] = self._ask(start)["versions"]
        except BaseException:  # An interrupt too must not leave it behind.
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(
        self, prompts: list[Prompt], *, before: Prompt | None = None, new_tokens: int
    ) -> tuple[float, list[Prompt]]:
        """Completes ``prompts`` with an empty cache, or one that holds ``before``.

        Returns the seconds that took and the new tokens of each prompt. `disturbance` is then what
        other processes took of the machine's CPU time meanwhile.

        Raises:
            EngineFailed: It is of no more use, and still to be closed.
        """
        self._signal(signal.SIGCONT)
        machine = Machine.now(self._process.pid)
        job = {"prompts": prompts, "before": before, "new_tokens": new_tokens, "forget": True}
        answer = self._ask(job)
        self.disturbance = self._others_since(machine)
        self._signal(signal.SIGSTOP)
        lengths = {len(ids) for ids in answer["token_ids"]}
        if len(answer["token_ids"]) != len(prompts) or lengths != {new_tokens}:
            raise EngineFailed(f"asked for {new_tokens} tokens each, answered {sorted(lengths)}")
        return answer["seconds"], answer["token_ids"]

    def disturbance_of_start(self) -> float | None:
        """Like `disturbance`, but since the process began."""
        return self._others_since(self._machine)

    def _others_since(self, before: Machine | None) -> float | None:
        """Share of all cores' time that other processes used."""
        now = Machine.now(self._process.pid)
        if before is None or now is None:
            return None
        return now.since(before)["others_cores"] / (os.cpu_count() or 1)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # Its log says why; no answer comes below.
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], self._timeout_s)[0]:
            raise EngineFailed(f"no answer in {self._timeout_s:.0f} s (--timeout allows more)")
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text()[-1500:]
            raise EngineFailed(f"the process ended without an answer; its log ends:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # It has ended, which `_ask` reports.
            os.killpg(self._process.pid, number)
