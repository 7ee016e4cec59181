"""A rank without a model, to time messages alone: it answers each step at once with zeros."""

import numpy as np

from quire.worker import model_runner, rank, tensor_parallel
from quire.worker.bench.stopwatch import replaced
from quire.worker.step import StepInput, StepOutput


class EchoRunner:
    """In the place of a `quire.worker.model_runner.ModelRunner`."""

    def __init__(self, config: object, *, device: object, tp: int) -> None:
        self._rank = tp

    def num_blocks_that_fit(self) -> int:
        return 1

    def allocate(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def execute(self, step: StepInput) -> StepOutput | None:
        if self._rank:
            return None
        return StepOutput(np.zeros(len(step.sample_rows_S), np.int64))


def main() -> None:
    with (
        replaced(model_runner, "ModelRunner", EchoRunner),
        replaced(tensor_parallel, "join", lambda *, rank, **_: rank),
    ):
        rank.main()


if __name__ == "__main__":
    main()
