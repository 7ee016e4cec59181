"""A rank that tells with each answer what its time was spent on; else as `quire.worker.rank`."""

from quire.worker import rank
from quire.worker.bench.step_parts import profiled, rank_targets, write_profiled
from quire.worker.bench.stopwatch import Stopwatch, replaced
from quire.worker.model_runner import ModelRunner


def main() -> None:
    stopwatch = Stopwatch()
    with stopwatch.watching(*rank_targets()):
        execute = profiled(ModelRunner.execute, stopwatch)
        with (
            replaced(ModelRunner, "execute", execute),
            replaced(rank, "write_output", write_profiled),
        ):
            rank.main()


if __name__ == "__main__":
    main()
