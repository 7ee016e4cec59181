"""The serving bench without a cluster: what it asks, what it loses, what it makes of answers."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.cluster.autoscaling.demand import Demand
from quire.cluster.gateway.telemetry import Telemetry
from quire.cluster.links.groups import Groups
from quire.router.directory import Applied, GroupId, NeedsResync
from quire.router.policy import GroupState, RouteRequest
from quire.router.table import RoutingTable
from quire.worker.errors import ConfigError
from quire.worker.events import BlocksStored, EventBatch
from quire.worker.hashing import BlockHash

BenchModule = Callable[[str], ModuleType]
A = GroupId("a")


def block(name: int) -> BlockHash:
    return BlockHash(bytes([name]) * 32)


# What is asked.


def test_chats_follow_from_the_seed_and_fit_the_model(bench_module: BenchModule) -> None:
    workloads = bench_module("serving.workloads")
    tenants = workloads.Tenants(num_chats=50, seed=3)
    chats = workloads.tenant_chats(tenants)
    assert chats == workloads.tenant_chats(tenants)
    assert chats != workloads.tenant_chats(workloads.Tenants(num_chats=50, seed=4))
    assert all(1 <= len(chat.turns) <= 4 for chat in chats)
    for chat in chats:
        whole = sum(len(turn.token_ids) + turn.max_tokens for turn in chat.turns)
        assert whole <= tenants.longest
    # A tenant's chats begin with its system prompt.
    firsts: dict[str, set[tuple[int, ...]]] = {}
    for chat in chats:
        firsts.setdefault(chat.cache_salt, set()).add(tuple(chat.turns[0].token_ids[:500]))
    assert 5 < len(firsts) < 50
    assert all(len(beginnings) == 1 for beginnings in firsts.values())


def test_laid_out_turns_contain_those_before_them(bench_module: BenchModule) -> None:
    workloads = bench_module("serving.workloads")
    chats = workloads.tenant_chats(workloads.Tenants(num_chats=200))
    requests = workloads.laid_out(chats, chats_per_s=10, seed=0, vocab_size=32_000)
    assert len(requests) == sum(len(chat.turns) for chat in chats)
    times = [request.at_s for request in requests]
    assert times == sorted(times)
    by_name = {request.name: request for request in requests}
    assert len(by_name) == len(requests)
    for name, request in by_name.items():
        chat, number = name.split("/")
        later = by_name.get(f"{chat}/{int(number) + 1}")
        if later is not None:
            assert later.token_ids[: len(request.token_ids)] == request.token_ids
            assert later.at_s > request.at_s
    begins = [r.at_s for name, r in by_name.items() if name.endswith("/0")]
    assert 15 < max(begins) < 26  # 200 of them at 10 a second: 20 s, give or take 1.4.


def test_a_shrunk_trace_shares_what_the_trace_shares(
    bench_module: BenchModule, tmp_path: Path
) -> None:
    workloads = bench_module("serving.workloads")
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1500, "output_length": 40, "hash_ids": [1, 2, 9]},
        {"timestamp": 900, "input_length": 99_000, "output_length": 40, "hash_ids": [4] * 200},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = workloads.read_conversation(
        file, num_requests=10, shrink=16, speed=2.0, max_tokens=2048, vocab_size=320
    )
    assert (len(first.token_ids), first.max_tokens, second.at_s) == (68, 2, 0.25)
    assert first.token_ids[:64] == second.token_ids[:64]
    assert first.token_ids[64:] != second.token_ids[64:68]
    file.write_text('{"timestamp": 0}')
    with pytest.raises(ConfigError, match=r"line 1: .*input_length"):
        workloads.read_conversation(
            file, num_requests=10, shrink=16, speed=1.0, max_tokens=2048, vocab_size=320
        )


def test_ones_own_requests_are_read_and_a_wrong_line_is_named(
    bench_module: BenchModule, tmp_path: Path
) -> None:
    workloads = bench_module("serving.workloads")
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6], "max_tokens": 3, "at_s": 1.5}\n')
    (request,) = workloads.read_requests(file)
    assert (request.name, request.token_ids, request.at_s) == ("line-1", (5, 6), 1.5)
    file.write_text('{"prompt": "Once"}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*prompt_token_ids"):
        workloads.read_requests(file)


def test_a_policy_may_differ_from_the_flags(bench_module: BenchModule) -> None:
    module = bench_module("serving.case")
    load = module.Load()
    plain, lossy, blind = module.cases(
        ["serve", "prefix_aware:lose_events=0.1,num_gateways=4", "random:use_directory=0"],
        load=load,
        lose_batches=0.0,
    )
    assert (plain.label, plain.num_gateways) == ("serve", 1)
    assert lossy.label == "prefix_aware, 10% of events lost, 4 gateways"
    assert blind.label == "random, no directory"
    assert plain.title == lossy.title
    assert module.case_of(json.loads(lossy.key)) == lossy
    for spec, message in (
        ("fastest", "policy='fastest': must be one of serve, prefix_aware"),
        ("random:lose=1", "'lose=1' is none of num_gateways"),
        ("random:lose_events=2", "lose_events=2.0: must be from 0 to 1"),
        ("random:use_step_clock=0", "random has none, use prefix_aware"),
        ("prefix_aware:use_step_clock=0,lose_events=0.1", "cannot be combined with losses"),
    ):
        with pytest.raises(ConfigError, match=message):
            module.cases([spec], load=load)


def test_each_case_runs_before_each_other_one_in_every_second_round(
    bench_module: BenchModule,
) -> None:
    module = bench_module("serving.case")
    some = module.cases(["serve", "random", "round_robin"], load=module.Load())
    order = [(number, case.policy) for number, case in module.in_turn(range(1, 3), some)]
    back, forth = ["round_robin", "random", "serve"], ["serve", "random", "round_robin"]
    assert order == [*((1, name) for name in back), *((2, name) for name in forth)]


def test_without_its_clock_the_policy_takes_no_step_to_be_under_way(
    bench_module: BenchModule,
) -> None:
    unclocked = bench_module("serving.unclocked")
    request = RouteRequest(hashes=[], num_prompt_tokens=300, block_size=16, now_s=10.0)
    state = GroupState(group=A, num_running=10, num_waiting=2, num_reserved_requests=1)
    busy = replace(state, step_began_s=9.9, step_s=0.2, num_step_tokens=64)
    costs = unclocked.Unclocked().costs(request, [busy, GroupState(group=GroupId("b"))], [100, 0])
    behind_each = 1 / 16 / 3072
    expected = [(1.25 + 200 * behind_each) * 200 + 24 * 13, (1.25 + 300 * behind_each) * 300]
    assert costs == pytest.approx(expected)


# What is lost.


def batch(first_seq: int, *names: int) -> EventBatch:
    events = tuple(BlocksStored([block(name)]) for name in names)
    return EventBatch(epoch=1, first_seq=first_seq, events=events)


def test_a_lost_or_late_message_leaves_a_gap_and_a_lost_event_does_not(
    bench_module: BenchModule,
) -> None:
    lossy = bench_module("serving.lossy")

    def table(**loss: float) -> Any:
        made = lossy.LossyTable(loss=lossy.Loss(**loss), block_size=16)
        made.update_members([A])
        return made

    gap = table(batches=1.0)
    assert gap.apply_events(A, batch(0, 1)) == Applied(0)
    # It did not arrive, so the next that does, be it a heartbeat, does not follow on.
    assert isinstance(gap.apply_events(A, EventBatch(epoch=1, first_seq=1)), NeedsResync)
    silent = table(events=1.0)
    assert silent.apply_events(A, batch(0, 1)) == Applied(1)
    assert silent.apply_events(A, batch(1, 2)) == Applied(1)
    assert silent.stats().directory.num_holdings == 0
    whole = table()
    assert whole.apply_events(A, batch(0, 1, 2)) == Applied(2)
    assert whole.stats().directory.num_holdings == 2
    twice = table(repeated=1.0)
    assert twice.apply_events(A, batch(0, 1)) == Applied(1)
    assert twice.apply_events(A, batch(1, 2)) == Applied(1)
    assert twice.stats().directory.num_holdings == 2
    late = table(overtaken=1.0)
    assert late.apply_events(A, batch(0, 1)) == Applied(0)
    assert isinstance(late.apply_events(A, batch(1, 2)), NeedsResync)
    assert late.stats().directory.num_holdings == 1, "the first came behind the second"


# What is made of answers.


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        **{"name": f"r{number}", "at_s": 0.1 * number, "end_s": 0.1 * number + 0.5},
        **{"ttft_s": 0.01 * (number + 1), "tpot_s": 0.004, "prompt": 100, "cached": 60},
        **{"predicted": 60, "output": 10, "group": "ab"[number % 2], "tokens": "x", "error": None},
        **more,
    }


def test_figures_leave_out_the_warm_up_and_count_failures(bench_module: BenchModule) -> None:
    module = bench_module("serving.figures")
    rows = [row(0, ttft_s=9.0), *(row(i) for i in range(1, 5))]
    values = module.figures(rows, num_groups=2)
    assert values["hit_rate"] == pytest.approx(0.6)
    assert values["ttft_mean_s"] == pytest.approx(0.035)
    assert values["ttft_p50_s"] == pytest.approx(0.035)
    assert values["balance"] == pytest.approx(1.0)
    assert values["output_tokens_per_s"] == pytest.approx(40 / 0.8)
    assert values["num_failed"] == 0
    rows[2] = row(2, error="UNAVAILABLE: gone", ttft_s=None)
    values = module.figures(rows, num_groups=2)
    assert values["num_failed"] == 1
    assert values["balance"] == pytest.approx(2 * 80 / 120)
    failed = [row(0, error="no", ttft_s=None)]
    assert module.figures(failed, num_groups=2) == {"num_requests": 1, "num_failed": 1}


def test_answers_that_differ_between_runs_are_counted(bench_module: BenchModule) -> None:
    module = bench_module("serving.figures")
    first = [row(1), row(2), row(3, error="gone", tokens="begun")]
    second = [row(1), row(2, tokens="y"), row(3)]
    assert module.num_unlike([first, second]) == (2, 1)


def test_gateways_that_completed_equally_many_are_counted_each(
    bench_module: BenchModule,
) -> None:
    counted = bench_module("serving.runs").counts_by_gateway
    pages = []
    for num_stopped, num_cancelled in ((5, 2), (7, 0), (0, 0)):
        groups = NoGroups()
        telemetry = Telemetry(groups=groups, table=RoutingTable(block_size=16))
        telemetry.completions.labels("stop").inc(num_stopped)
        telemetry.completions.labels("cancelled").inc(num_cancelled)
        pages.append(telemetry.render().decode())
    first, second, third = pages
    assert counted([first, second, first, third], num_gateways=3) == [0, 7, 7]
    assert counted([first, first], num_gateways=3) == [7]
    more = iter([first, second, third])
    assert counted(more, num_gateways=2) == [7, 7]
    assert next(more) == third


class NoGroups(Groups):
    """And no event loop, which real ones need."""

    def __init__(self) -> None:
        self.demand = Demand()
        self._loads, self._attached = {}, {}


def streams(load: ModuleType) -> Iterable[Any]:
    """Two tenants' chats, as if a cluster of one group had answered in 30 ms."""
    for number in range(40):
        salt = f"tenant-{number % 2}"
        request = load.Request(
            name=f"r{number}", token_ids=(*range(96), 100 + number), max_tokens=4, cache_salt=salt
        )
        stream = load.Stream(request=request, group="a", finish="length", num_cached_tokens=96)
        stream.sent_s = 50 + 0.2 * number
        stream.tokens, stream.times = [1, 2, 3, 4], [stream.sent_s + 0.03] * 4
        stream.ended_s = stream.sent_s + 0.03
        yield stream


def test_a_run_is_tabled_and_replayed_in_the_simulator(
    bench_module: BenchModule, tmp_path: Path
) -> None:
    case_module, figures = bench_module("serving.case"), bench_module("serving.figures")
    runs_module = bench_module("serving.runs")
    sent = list(streams(bench_module("serving.load")))
    state = tmp_path / "state.jsonl"
    with state.open("w") as file:
        for policy in ("round_robin", "prefix_aware"):
            case = case_module.Case(policy=policy, num_groups=1, load=case_module.Load())
            rows = figures.rows_of(sent)
            record = {
                **{"case": json.loads(case.key), "round": 0, "trace": "t.jsonl", "gateways": [40]},
                # 10 ms, 0.08 a token; and half as much again of everything, and 3 ms of path.
                **{"probes": [(100, 0.018), (200, 0.03), (200, 0.1)]},
                **{"rows": rows, "values": figures.figures(rows, num_groups=1)},
            }
            file.write(json.dumps(record) + "\n")
    runs = runs_module.Runs(state)
    assert runs.has(case, 0)
    assert not runs.has(case, 1)
    table = "\n".join(bench_module("serving.report").tables(runs.records, reference="round_robin"))
    assert "| prefix_aware | 1 | 99.0 % | 30.0 |" in table
    assert "40 requests were answered by several runs; 0 of them not" in table

    figures.write_trace(sent, runs.trace_folder / "t.jsonl", block_size=16)
    fit = tmp_path / "step.json"
    steps = [("1 decode", 2000.0), ("8 decodes", 2700.0), ("prefill 100", 10_000.0)]
    data = {
        **{"benchmark": "step", "context": 100, "num_steps": 10},
        "rows": [{"kind": k, "is_async": False, "step": {"median_us": us}} for k, us in steps],
    }
    fit.write_text(json.dumps(data))
    text = "\n".join(bench_module("serving.validate").validation(runs, fit=[fit]))
    # Each tenant's 6 blocks are computed once, before what is counted: then one token is left.
    assert "took 1.50 times as long as `quire bench step` says, and the path adds 3.0 ms" in text
    assert "| prefix_aware | 1 | 99.0 % / 99.0 % | 6." in text
    assert "Hit rates differ by 0.0 points" in text
