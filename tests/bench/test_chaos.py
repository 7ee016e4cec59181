"""Verdicts of `bench.chaos` on streams: a broken guarantee is never reported as kept."""

from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]
REFERENCE = {"one": [1, 2, 3, 4], "two": [5, 6, 7, 8]}


@pytest.fixture
def verdicts(bench_module: Import) -> ModuleType:
    return bench_module("chaos.verdicts")


@pytest.fixture
def stream(bench_module: Import) -> Callable[..., object]:
    load = bench_module("serving.load")

    def make(
        name: str,
        tokens: Sequence[int],
        *,
        finish: str = "length",
        error: str | None = None,
        times: Sequence[float] | None = None,
        group: str = "",
    ) -> object:
        times = list(times if times is not None else range(len(tokens)))
        return load.Stream(
            request=load.Request(name=name, token_ids=(9, 9), max_tokens=4),
            tokens=list(tokens),
            times=times,
            finish=finish,
            error=error,
            group=group,
            ended_s=times[-1] if times else 0.0,
        )

    return make


def test_streams_are_exact_only_if_each_is_complete_and_the_same(
    verdicts: ModuleType, stream: Callable[..., object]
) -> None:
    good = [stream("one", [1, 2, 3, 4]), stream("two", [5, 6, 7, 8])]
    cases = {
        "good": (good, 0),
        "another token": ([good[0], stream("two", [5, 6, 0, 8])], 1),
        "a token lost": ([good[0], stream("two", [5, 6, 8])], 1),
        "a token twice": ([good[0], stream("two", [5, 6, 6, 7, 8])], 1),
        "a false end": ([good[0], stream("two", [5, 6])], 1),
        "an error": ([good[0], stream("two", [5], finish="", error="UNAVAILABLE: gone")], 1),
    }
    for case, (streams, num_broken) in cases.items():
        outcome = verdicts.Outcome()
        verdicts.check_exact(outcome, streams, REFERENCE)
        assert len(outcome.broken) == num_broken, (case, outcome)


def test_an_error_is_a_clean_end_and_a_short_answer_is_not(
    verdicts: ModuleType, stream: Callable[..., object]
) -> None:
    cases = {
        "clean": (stream("one", [1, 2], finish="", error="UNAVAILABLE: reset"), 0),
        "whole": (stream("one", [1, 2, 3, 4]), 0),
        "another code": (stream("one", [1, 2], finish="", error="INTERNAL: oops"), 1),
        "wrong before its end": (stream("one", [1, 9], finish="", error="UNAVAILABLE: reset"), 1),
        # Other than the reference, and that as if it were all.
        "short": (stream("one", [1, 2]), 2),
    }
    for case, (one, num_broken) in cases.items():
        outcome = verdicts.Outcome()
        verdicts.check_clean_ends(outcome, [one], REFERENCE, codes=("UNAVAILABLE",))
        assert len(outcome.broken) == num_broken, (case, outcome)


def test_the_largest_gap_is_held_against_its_bound(
    verdicts: ModuleType, stream: Callable[..., object]
) -> None:
    streams = [stream("one", [1, 2, 3, 4], times=[0, 1, 1.5, 4])]
    for bound_s, is_kept in ((2.4, False), (2.5, True)):
        outcome = verdicts.Outcome()
        verdicts.check_gap(outcome, streams, bound_s=bound_s, why="")
        assert (not outcome.broken) == is_kept


def test_what_is_recomputed_are_the_contexts_on_the_lost_group(
    verdicts: ModuleType, stream: Callable[..., object]
) -> None:
    streams = [
        stream("one", [1, 2, 3, 4], times=[1, 2, 3, 4], group="a"),  # 2 of prompt, 2 of output.
        stream("two", [5, 6, 7, 8], times=[1, 2, 3, 4], group="b"),
        stream("two", [5, 6], times=[0, 1], group="a"),  # Ended before.
    ]
    assert verdicts.tokens_to_recompute(streams, group="a", at_s=2.5) == 4


def test_the_matrix_says_what_was_broken(verdicts: ModuleType) -> None:
    kept = verdicts.Outcome(seen=["all exact"])
    broken = verdicts.Outcome(seen=["9/10 exact"], broken=["a|b"])
    absent = verdicts.Outcome(was_run=False)
    lines = list(
        verdicts.matrix(
            [
                verdicts.Row("kill", "exact", kept),
                verdicts.Row("stop", "exact", broken),
                verdicts.Row("cut", "exact", absent),
            ]
        )
    )
    assert lines[2:] == [
        "| kill | exact | all exact | yes |",
        "| stop | exact | 9/10 exact; **a\\|b** | no |",
        "| cut | exact |  | not run |",
    ]
