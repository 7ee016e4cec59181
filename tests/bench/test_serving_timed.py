"""What the serving bench makes of timed runs, and of a machine that others use too."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.router.simulate.cost import PRESETS
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace import Row, Trace
from quire.worker.errors import ConfigError
from quire.worker.hashing import BlockHash

BenchModule = Callable[[str], ModuleType]


# What steps cost.


def step(by: str, begin_s: float, took_ms: float, *, prefill: int, decodes: int) -> dict[str, Any]:
    return {
        **{"kind": "step", "by": by, "begin_s": begin_s, "end_s": begin_s + took_ms / 1000},
        **{"cpu_s": took_ms / 2000, "prefill": prefill, "products": 100 * prefill},
        **{"decodes": decodes, "context": 500 * decodes},
    }


def cost_ms(prefill: int, decodes: int) -> float:
    """A base of 4, 0.4 a token, 0.0001 for each that it attends to; 5 and 0.002 for decodes."""
    prefill_ms = 4 + 0.4 * prefill + 0.0001 * (100 * prefill + prefill**2 / 2) if prefill else 0.0
    return prefill_ms + (5 + 0.002 * 500 * decodes if decodes else 0.0)


def test_step_costs_and_contention_are_found_again(bench_module: BenchModule) -> None:
    steps = bench_module("serving.steps")
    lines = []
    kinds = [(p, d) for p in (0, 10, 100, 500) for d in (0, 1, 4, 9) if p or d]
    for number, (prefill, decodes) in enumerate(kinds):
        alone_ms = cost_ms(prefill, decodes)
        # First alone, then both groups at once, who take half as long again. In between, pauses.
        lines.append(step("a", 10.0 * number, alone_ms, prefill=prefill, decodes=decodes))
        lines.extend(
            step(by, 10.0 * number + 5, 1.5 * alone_ms, prefill=prefill, decodes=decodes)
            for by in "ab"
        )
    fit = steps.fit_steps([lines], num_cache_tokens=10_000)
    assert fit.contention == pytest.approx(0.5, rel=1e-3)
    assert (fit.cost.base, fit.cost.per_token) == pytest.approx((4, 0.4), rel=1e-2)
    assert (fit.cost.per_context, fit.cost.per_token2) == pytest.approx((1e-4, 5e-5), rel=1e-2)
    assert (fit.cost.decode_base, fit.cost.decode_linear) == pytest.approx((5, 20), rel=1e-2)
    assert fit.explained > 0.999
    assert fit.on_cpu == pytest.approx(0.5)


def test_the_pause_between_two_steps_is_part_of_the_first(bench_module: BenchModule) -> None:
    steps = bench_module("serving.steps")
    lines = []
    for number in range(40):
        prefill, decodes = (0, 1 + number % 7) if number % 2 else (10 + 10 * (number % 9), 0)
        # Pairs of steps 1 ms apart, and then nothing for a while.
        begin_s = number // 2 + (number % 2) * (0.1 + 0.001)
        lines.append(step("a", begin_s, 100.0, prefill=prefill, decodes=decodes))
    fit = steps.fit_steps([lines], num_cache_tokens=10_000)
    assert fit.cost.prefill_ms(50) == pytest.approx(101.0)
    assert fit.contention == 0


def test_a_fit_by_which_decodes_take_no_time_is_refused(bench_module: BenchModule) -> None:
    """Seen of a short run beside others' work: the simulator then divided by the time of a step."""
    steps = bench_module("serving.steps")
    lines = []
    for number in range(40):
        prefill, decodes = (0, 3) if number % 2 else (10 + 10 * (number % 9), number % 3)
        took_ms = 4.0 + prefill if prefill else 0.0
        lines.append(step("a", float(number), took_ms, prefill=prefill, decodes=decodes))
    with pytest.raises(ConfigError, match="prefills or decodes take no time"):
        steps.fit_steps([lines], num_cache_tokens=10_000)


# The way of a request.


def test_the_stages_of_a_way_add_up_to_the_time_to_first_token(bench_module: BenchModule) -> None:
    way = bench_module("serving.way")
    points = (
        *("arrived_s", "prepared_s", "routed_s", "came_s"),
        *("added_s", "began_s", "first_s", "started_s"),
    )
    rows, lines = [], []
    for number in range(5):
        sent_s = 100.0 + number
        name = f"{number}-0"
        rows.append({"id": name, "sent_s": sent_s, "ttft_s": 0.045, "error": None})
        times = {p: sent_s + 0.001 * (i + 1) * (i + 2) / 2 for i, p in enumerate(points)}
        lines.append({"kind": "gateway", "request": name} | dict(list(times.items())[:4]))
        lines.append({"kind": "request", "request": name} | dict(list(times.items())[4:]))
    lines.append({"kind": "request", "request": "unknown", "came_s": 1.0})
    rows[3]["error"] = "gone"
    stages = way.stages_of(rows, lines)
    assert stages.shape == (3, len(way.STAGES))  # One warmed up, one failed.
    assert 1000 * stages[0] == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8, 9], abs=1e-6)
    assert way.mean_path_s([rows], [lines]) == pytest.approx(0.001 * (1 + 2 + 4 + 8 + 9))


# The simulator beside a timed run.


def test_a_timed_run_is_replayed_at_the_cost_of_its_own_steps(
    bench_module: BenchModule, tmp_path: Path
) -> None:
    case_module, figures = bench_module("serving.case"), bench_module("serving.figures")
    load, runs_module = bench_module("serving.load"), bench_module("serving.runs")
    timed = bench_module("serving.timed")
    streams = []
    for number in range(40):
        tokens = (*range(96), 100 + number)
        stream = load.Stream(
            request=load.Request(name=f"r{number}", token_ids=tokens, max_tokens=4),
            **{"server_id": f"{number}-0", "group": "a", "finish": "length"},
        )
        stream.sent_s, stream.num_cached_tokens = 50 + 0.2 * number, 96
        stream.tokens, stream.times = [1, 2, 3, 4], [stream.sent_s + 0.03] * 4
        stream.ended_s = stream.sent_s + 0.03
        streams.append(stream)
    rows = figures.rows_of(streams)
    case = case_module.Case(policy="round_robin", num_groups=1, load=case_module.Load())
    record = {
        **{"case": json.loads(case.key), "round": 0, "trace": "t.jsonl", "times": "t"},
        **{"rows": rows, "values": figures.figures(rows, num_groups=1)},
    }
    (tmp_path / "state.jsonl").write_text(json.dumps(record) + "\n")
    runs = runs_module.Runs(tmp_path / "state.jsonl")
    figures.write_trace(streams, runs.trace_folder / "t.jsonl", block_size=16)

    # 2 ms to the gateway, 1 to the group and 7 back; there, 20 in all.
    points = (
        *(("arrived_s", 0.002), ("prepared_s", 0.002), ("routed_s", 0.002), ("came_s", 0.003)),
        *(("added_s", 0.003), ("began_s", 0.003), ("first_s", 0.023), ("started_s", 0.03)),
    )
    requests = [
        {"kind": "request", "request": row["id"]} | {p: row["sent_s"] + s for p, s in points}
        for row in rows
    ]
    kinds = [(p, d) for p in (0, 10, 100, 500) for d in (0, 1, 4, 9) if p or d] * 2
    steps = [
        step("", 10.0 * number, cost_ms(prefill, decodes), prefill=prefill, decodes=decodes)
        for number, (prefill, decodes) in enumerate(kinds)
    ]
    for line in steps:
        del line["by"]
    timed.write_lines(runs.trace_folder / "t" / "group-a.jsonl", [*steps, *requests])

    text = "\n".join(bench_module("serving.validate").validation(runs, fit=[]))
    assert "30 steps of 1 runs together: a prefill takes 4.0 ms, 400 µs a token" in text
    assert "The path adds 10.0 ms." in text
    # One token is left to compute, behind 96: 4.4 ms and 0.0096 more.
    assert "| round_robin | 1 | 99.0 % / 99.0 % | 14.4 / 30.0 |" in text
    assert "| round_robin | 0 | 0.48 | 0.48 | 0.48 | 0.15 | 0.48 |" in text
    way = "\n".join(bench_module("serving.way").ways(runs))
    assert "| round_robin, 1 groups | 32 | 2.0 (2.0) | 0.0 (0.0) | 0.0 (0.0) | 1.0 (1.0) |" in way


def test_draws_share_what_the_trace_shares_and_come_a_moment_later(
    bench_module: BenchModule,
) -> None:
    drawn = bench_module("serving.validate").drawn
    names = [BlockHash(bytes([number]) * 32) for number in range(4)]
    chains = [tuple(names[:3]), (names[0], names[1], names[3]), (names[2],)]
    rows = [Row(100.0 * i, 48, 2, chain) for i, chain in enumerate(chains)]
    trace = Trace.of(rows, name="three", block_size=16)
    one, same, other = (drawn(trace, seed) for seed in (1, 1, 2))
    assert one == same
    a, b, c = one.chains
    assert (a[:2] == b[:2], a[2] == b[2], c[0] == a[2], len({*a, *b, *c})) == (True, False, True, 4)
    assert not {*a, *b, *c} & {name for chain in (*other.chains, *chains) for name in chain}
    assert all(abs(b - a) <= 2 for a, b in zip(trace.arrival_ms, one.arrival_ms, strict=True))
    assert list(one.num_input) == [48, 48, 48]


# How closely predictions agree.


def test_only_pairs_that_every_round_measured_alike_are_clear(bench_module: BenchModule) -> None:
    agreement = bench_module("serving.agreement")

    def pairs(label: str, predicted_s: float, *measured_s: float) -> list[Any]:
        fixed = {"hit_rate": 0.8, "ttft_p50_s": 0.01, "ttft_p90_s": 0.05}
        return [
            agreement.Pair(
                label=label,
                round=number,
                measured={**fixed, "ttft_mean_s": mean_s},
                draws=[
                    {**fixed, "hit_rate": 0.81, "ttft_mean_s": times * predicted_s}
                    for times in (1.0, 0.9, 0.8, 1.1, 1.4)
                ],
            )
            for number, mean_s in enumerate(measured_s)
        ]

    # a before b in every round, a and c alike within noise, b and c not at all as predicted.
    every = [
        *pairs("a", 0.02, 0.020, 0.030, 0.022),
        *pairs("b", 0.04, 0.040, 0.050, 0.045),
        *pairs("c", 0.05, 0.021, 0.029, 0.021),
    ]
    text = "\n".join(agreement.table(every))
    assert "| a | 3 | 81.0 % / 80.0 % | 20.0 / 22.0 |" in text
    # Of 16 to 28 ms, two are within.
    assert "| 0.91 (0.67 to 1.00) | 0.80 to 1.40 | 2 |" in text
    assert "Hit rates differ by 1.0 points on average over all runs, by 1.0 at most." in text
    assert (
        "By mean TTFT, 1 of 3 pairs of lines are in the same order, and 1 of the 2 that were "
        "measured in one order in every round." in text
    )


def test_forecasts_are_held_against_what_came_behind_the_warm_up(
    bench_module: BenchModule,
) -> None:
    forecasts = bench_module("serving.forecasts")
    run = [(9.0, 1.0), (9.0, 1.0), (None, 0.05), *[(0.09, 0.1)] * 4, (0.3, 0.1), (0.2, 0.4)]
    table = "\n".join(forecasts.forecast_table([("a", run), ("b", [(None, 1.0)] * 5)]))
    # 20 % of 9 is 1: that one is left out. Errors are then 10 % four times, 50 %, 200 % and 800 %,
    # whose place 0.9 * 6 is two fifths of the way between the last two; the sums are 9.86 and 1.9.
    assert "| a | 8 | 7 | 10% | 440% | 10.0 | 5.19 |" in table
    assert "| b |" not in table
    assert list(forecasts.forecast_table([])) == []


# The cluster's admission in the simulator.


def test_the_admission_lets_all_go_where_groups_are_free_and_holds_a_burst(
    bench_module: BenchModule,
) -> None:
    case_module, admitted = bench_module("serving.case"), bench_module("serving.admitted")
    case = case_module.Case(policy="round_robin", load=case_module.Load())
    config = SimulationConfig(
        num_groups=2, policy="round_robin", cost=PRESETS["cpu-125m"], use_table=True
    )

    def trace(gap_ms: float) -> Trace:
        rows = [Row(gap_ms * number, 1000, 4, ()) for number in range(40)]
        return Trace.of(rows, name="by hand", block_size=16)

    spread = trace(1000.0)
    with_gate = simulate(spread, config, make_gate=admitted.admitted(case))
    assert with_gate.digest == simulate(spread, config).digest
    burst = trace(1.0)
    with_gate = simulate(burst, config, make_gate=admitted.admitted(case))
    assert all(with_gate.last_token_ms)
    assert with_gate.digest != simulate(burst, config).digest


# A machine that others use too.


def test_others_work_is_what_is_not_of_this_process_and_its_descendants(
    bench_module: BenchModule, tmp_path: Path
) -> None:
    machine = bench_module("serving.machine")
    tick_s = 1 / os.sysconf("SC_CLK_TCK")

    def write(busy: int, processes: dict[int, tuple[int, int]]) -> None:
        (tmp_path / "stat").write_text(f"cpu  {busy - 30} 0 10 5000 7 5 5 10 0 0\ncpu0 1\n")
        for number, (parent, ticks) in processes.items():
            (tmp_path / str(number)).mkdir(exist_ok=True)
            stat = f"{number} (a) (b c) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 1 1 1 20 0 1 0 99\n"
            (tmp_path / str(number) / "stat").write_text(stat)

    ours = os.getpid()
    write(1000, {1: (0, 900), ours: (1, 50), 7: (ours, 10), 8: (7, 5), 9: (1, 40)})
    before = machine.Machine.now(proc=tmp_path)
    write(1300, {1: (0, 900), ours: (1, 150), 7: (ours, 20), 8: (7, 95), 9: (1, 140)})
    after = machine.Machine.now(proc=tmp_path)
    assert before is not None
    assert after is not None
    assert after.busy_s - before.busy_s == pytest.approx(300 * tick_s)
    assert after.ours_s - before.ours_s == pytest.approx(200 * tick_s)
    assert machine.Machine.now(proc=tmp_path / "none") is None
