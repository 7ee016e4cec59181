"""The serving benchmark without a cluster: its requests, its lost messages and its figures."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire.router.prefix_index.directory import Applied, GroupId, NeedsResync
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError

BenchModule = Callable[[str], ModuleType]
MAX_POSITIONS = 2048
"""Maximum positions of the checkpoints."""
A = GroupId("a")


def block(name: int) -> BlockHash:
    return BlockHash(bytes([name]) * 32)


# Requests


def test_chats_follow_from_the_seed_and_fit_the_model(bench_module: BenchModule) -> None:
    workloads = bench_module("serving.workloads")
    make = partial(workloads.tenant_chats, num_tenants=40, num_chats=50, think_s=0.3)
    chats = make(seed=3)
    assert chats == make(seed=3)
    assert chats != make(seed=4)
    assert all(1 <= len(chat.turns) <= 4 for chat in chats)
    for chat in chats:
        whole = sum(len(turn.token_ids) + turn.max_tokens for turn in chat.turns)
        assert whole <= MAX_POSITIONS
    # Chats of a tenant begin with its system prompt.
    firsts: dict[str, set[tuple[int, ...]]] = {}
    for chat in chats:
        firsts.setdefault(chat.cache_salt, set()).add(tuple(chat.turns[0].token_ids[:500]))
    assert 5 < len(firsts) < 50
    assert all(len(beginnings) == 1 for beginnings in firsts.values())


def test_laid_out_turns_contain_those_before_them(bench_module: BenchModule) -> None:
    workloads = bench_module("serving.workloads")
    chats = workloads.tenant_chats(num_tenants=40, num_chats=200, think_s=0.3, seed=0)
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


def test_a_policy_may_differ_from_the_flags(bench_module: BenchModule) -> None:
    module = bench_module("serving.case")
    plain, lossy, blind = module.cases(
        [
            "round_robin",
            "prefix_aware:lose_events=0.1,num_gateways=4",
            "power_of_two:use_directory=0",
        ],
        lose_batches=0.0,
    )
    assert (plain.label, plain.num_gateways) == ("round_robin", 1)
    assert lossy.label == "prefix_aware, 10% of events lost, 4 gateways"
    assert blind.label == "power_of_two, no directory"
    assert plain.title == lossy.title
    assert module.Case(**json.loads(json.dumps(asdict(lossy)))) == lossy
    for spec, message in (
        ("fastest", "policy='fastest': must be one of prefix_aware"),
        ("power_of_two:lose=1", "'lose=1' is none of num_gateways"),
        ("power_of_two:lose_events=2", "lose_events=2.0: must be from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            module.cases([spec])


def test_each_case_runs_before_each_other_one_in_every_second_round(
    bench_module: BenchModule,
) -> None:
    module = bench_module("serving.case")
    some = module.cases(["prefix_aware", "power_of_two", "round_robin"])
    order = [(number, case.policy) for number, case in module.in_turn(range(1, 3), some)]
    forth = ["prefix_aware", "power_of_two", "round_robin"]
    back = forth[::-1]
    assert order == [*((1, name) for name in back), *((2, name) for name in forth)]


# Lost messages


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
    # It did not arrive, so the next to arrive, even a heartbeat, does not follow on.
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


# Figures


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


def test_a_run_is_tabled(bench_module: BenchModule, tmp_path: Path) -> None:
    case_module, figures = bench_module("serving.case"), bench_module("serving.figures")
    runs_module = bench_module("serving.runs")
    sent = list(streams(bench_module("serving.load")))
    state = tmp_path / "state.jsonl"
    with state.open("w") as file:
        for policy in ("round_robin", "prefix_aware"):
            case = case_module.Case(policy=policy, num_groups=1)
            rows = figures.rows_of(sent)
            record = {
                **{"case": asdict(case), "round": 0},
                **{"rows": rows, "values": figures.figures(rows, num_groups=1)},
            }
            file.write(json.dumps(record) + "\n")
    runs = runs_module.Runs(state)
    assert runs.has(case, 0)
    assert not runs.has(case, 1)
    table = "\n".join(bench_module("serving.report").tables(runs.records, reference="round_robin"))
    assert "| prefix_aware | 1 | 99.0 % | 30.0 |" in table
    assert "40 requests were answered by several runs; 0 of them not" in table


# A machine with other users.


def test_others_work_is_what_is_not_of_this_process_and_its_descendants(
    bench_module: BenchModule, tmp_path: Path
) -> None:
    machine = bench_module("machine")
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
    alone = machine.Machine.now(8, proc=tmp_path)
    assert alone is not None
    assert alone.ours_s == pytest.approx(98 * tick_s), "of one process, and of what it started"
    assert machine.Machine.now(proc=tmp_path / "none") is None
