"""A rank without a model, to time messages alone: it answers each step at once with zeros."""

from unittest import mock

import numpy as np

from quire.worker.model import tensor_parallel
from quire.worker.ranks import rank
from quire.worker.runner import model_runner
from quire.worker.step.late_tokens import Done, Pending
from quire.worker.step.messages import StepInput, StepOutput


class EchoRunner:
    """In the place of a `quire.worker.runner.model_runner.ModelRunner`."""

    numerics = ""

    def __init__(self, config: object, *, device: object, tp: int) -> None:
        self._rank = tp

    def num_blocks_that_fit(self) -> int:
        return 1

    def allocate(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def launch(self, step: StepInput, **_: object) -> Pending | None:
        if self._rank:
            return None
        return Done(StepOutput(np.zeros(len(step.samples_S), np.int64)))


def main() -> None:
    with (
        mock.patch.object(model_runner, "ModelRunner", EchoRunner),
        mock.patch.object(tensor_parallel, "join", lambda *, rank, **_: rank),
    ):
        rank.main()


if __name__ == "__main__":
    main()
