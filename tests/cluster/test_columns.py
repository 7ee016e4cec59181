"""Tables of commands fit the terminal's width; pipes get unwrapped lines."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cluster.cli import columns
from quire.cluster.features.explain import command as explain
from quire.cluster.tools import top
from quire.cluster.tools.demo.run import Answer, _print_table
from quire.v1 import inference_pb2 as pb
from quire.v1.admin_pb2 import GatewayLoad, Group, ListGroupsResponse

ROWS = st.integers(1, 6).flatmap(
    lambda num: st.lists(
        st.lists(st.text("abc ", max_size=30), min_size=num, max_size=num), min_size=1, max_size=4
    )
)


@given(ROWS, st.integers(40, 100))
def test_rows_fit_the_width_and_keep_all_their_letters(rows: list[list[str]], width: int) -> None:
    shown = columns.table(rows, width=width)
    assert max(map(len, shown.split("\n"))) <= width
    letters = sorted("".join(cell for row in rows for cell in row).replace(" ", ""))
    assert sorted(re.sub(r"\s", "", shown)) == letters
    assert len(columns.table(rows).split("\n")) == len(rows)


def decision(number: int) -> pb.RoutingDecision:
    candidates = [
        pb.RoutingCandidate(
            group=f"s32po99{each}",
            cost=123_456,
            num_cached_tokens=12_345,
            num_prefill_tokens=12_345,
            num_queued_tokens=123_456,
            num_sequences=128,
            forecast_s=12.34,
            num_fetched_tokens=12_345,
            adapter_cost=12_345,
        )
        for each in range(3)
    ]
    return pb.RoutingDecision(
        request_id=f"{number:024x}",
        attempt=2,
        decided_at_s=1.0e9 + number,
        num_prompt_tokens=12_345,
        num_cached_tokens=12_288,
        waited_s=0.0123,
        outcome="moved: the group is lost, and its streams went on at another one",
        routing=pb.Routing(
            group="s32po990",
            reason="fetched_prefix",
            predicted_cached_tokens=12_288,
            forecast_s=0.0123,
            candidates=candidates,
        ),
    )


def test_explain_fits_80_columns_and_leaves_each_request_name_whole() -> None:
    decisions = [decision(number) for number in range(3)]
    shown = explain.overview(decisions, width=80).split("\n")
    assert max(map(len, shown)) <= 80
    for each in decisions:
        assert any(line.startswith(f"  {each.request_id} #2  moved:") for line in shown)
    wide = explain.overview(decisions).split("\n")
    assert len(wide) == 1 + len(decisions)
    assert explain.overview(decisions, width=400) == "\n".join(wide)
    page = explain.detailed(decisions[0], width=80).split("\n\n")[-1]
    assert max(map(len, page.split("\n"))) <= 80
    assert "12,345" in page


def test_top_fits_80_columns() -> None:
    gateway = GatewayLoad(num_inflight=12_345, num_queued=12_345)
    groups = [
        Group(id=f"abcdefg{number}", model=f"org/name-of-{number}", num_running=128, num_waiting=99)
        for number in range(64)
    ]
    groups.append(Group(address="10.0.0.1:40000", trouble="connection refused by its node " * 3))
    seen = ListGroupsResponse(groups=groups, gateway=gateway)
    before = ListGroupsResponse(groups=groups)
    shown = top.frame(before, seen, interval_s=1.0, width=80)
    assert max(map(len, shown.split("\n"))) <= 80
    first, second, *_ = top.frame(before, seen, interval_s=1.0).split("\n")
    assert (len(first) > 80, second[:13]) == (True, "this gateway:")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_table_of_the_demo_fits_and_a_pipe_has_no_width(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    answer = Answer(
        question="What is a KV cache, and why does it take so much room?",
        text="",
        routing=pb.Routing(group="s32po99t", reason="cached_prefix"),
        usage=pb.Usage(num_prompt_tokens=253, num_cached_tokens=240, total_time_s=1.0),
    )
    _print_table([answer])
    lines = capsys.readouterr().out.split("\n")
    assert (max(map(len, lines)) <= 80) == is_terminal
    assert columns.terminal_width() == (80 if is_terminal else None)
