"""A rank that tells with each answer what its time was spent on; else as `quire.worker.rank`."""

from quire.worker import rank
from quire.worker.bench.step_parts import ProfiledStepOutput, rank_targets
from quire.worker.bench.stopwatch import Stopwatch, replaced
from quire.worker.step import StepInput, StepOutput


def main() -> None:
    from quire.worker.model_runner import ModelRunner

    stopwatch = Stopwatch()
    with stopwatch.watching(*rank_targets()):
        execute = ModelRunner.execute

        def profiled(runner: ModelRunner, step: StepInput) -> StepOutput | None:
            output = execute(runner, step)
            times_ns = stopwatch.take()
            if output is None:
                return None
            return ProfiledStepOutput(output.token_ids_S, output.logprobs, times_ns)

        with replaced(ModelRunner, "execute", profiled):
            rank.main()


if __name__ == "__main__":
    main()
