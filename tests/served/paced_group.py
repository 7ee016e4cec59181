"""A replica group with a configurable pause before each step, so that tests of streams do not
depend on the machine's speed."""

import os
import time
from pathlib import Path

from quire.cluster.config import GroupConfig
from quire.cluster.deploy import deployments

PACE = "QUIRE_TEST_PACE"
"""Environment variable: path of a file with the seconds that each step waits before it begins. The
file is read at each step, so that a test may change it with `set_pace`."""


def set_pace(path: Path, seconds: float) -> None:
    new = path.with_suffix(".new")
    new.write_text(str(seconds))
    new.rename(path)  # Atomic, so that no reader sees half a file.


class ReplicaGroup(deployments.ReplicaGroup):
    # The class name is the deployment's name, which must equal Quire's.
    async def __init__(self, config: GroupConfig) -> None:  # type: ignore[misc]
        await super().__init__(config)
        engine = self._server._engine
        pace = Path(os.environ[PACE])
        step = engine.step

        def paced_step():  # type: ignore[no-untyped-def]
            time.sleep(float(pace.read_text()))
            return step()

        engine.step = paced_step  # type: ignore[method-assign]
