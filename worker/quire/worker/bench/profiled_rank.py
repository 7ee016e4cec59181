"""A rank that tells with each answer what its time was spent on; else as
`quire.worker.ranks.rank`."""

from quire.worker.bench.step_parts import profiled, rank_targets, write_profiled
from quire.worker.bench.stopwatch import Stopwatch, replaced
from quire.worker.ranks import rank
from quire.worker.runner.model_runner import ModelRunner


def main() -> None:
    stopwatch = Stopwatch()
    with stopwatch.watching(*rank_targets()):
        launch = profiled(ModelRunner.launch, stopwatch)
        with (
            replaced(ModelRunner, "launch", launch),
            replaced(rank, "write_output", write_profiled),
        ):
            rank.main()


if __name__ == "__main__":
    main()
