"""The output of the console and its commands for a cluster."""

import asyncio
import io
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.cli.main import main
from quire.cluster.deploy import kept_logs, local
from quire.cluster.deploy.status_line import StatusLine
from quire.cluster.deploy.ticker import ERASE
from quire.cluster.edge.admin_grpc import overview_of
from quire.cluster.telemetry.rates import Rates, first_token_s, is_busy
from quire.cluster.tools import top
from quire.v1 import admin_pb2 as pb
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio


def group(name: str, **counts: Any) -> pb.Group:
    return pb.Group(id=name, state=pb.Group.SERVING, num_blocks=100, **counts)


def test_rates_are_differences_over_time_of_groups_that_were_there_before() -> None:
    before = [group("a", num_prompt_tokens=10, num_hit_tokens=5, num_output_tokens=7)]
    after = [
        group("a", num_prompt_tokens=30, num_hit_tokens=10, num_output_tokens=17),
        group("new", num_prompt_tokens=999, num_output_tokens=999, num_held_blocks=50),
    ]
    rates = Rates.between(before, after, interval_s=2.0)
    assert (rates.prompt_per_s, rates.output_per_s) == (10, 5)
    assert (rates.hit_rate, rates.kv_use) == (5 / 20, 50 / 200)
    again = [group("a", num_output_tokens=3)]  # It has restarted.
    assert Rates.between(after, again, interval_s=1.0).output_per_s == 0


def test_first_tokens_are_those_between_the_looks() -> None:
    def gateway(*counts: int) -> pb.GatewayLoad:
        return pb.GatewayLoad(ttft_bounds_s=[0.1, 1.0], ttft_counts=counts)

    before, after = gateway(50, 0, 0), gateway(51, 1, 2)
    assert first_token_s(before, after, 0.25) == 0.1
    assert first_token_s(before, after, 0.5) == 1.0
    assert first_token_s(before, after, 0.99) == float("inf")
    assert first_token_s(before, before, 0.5) is None
    assert first_token_s(pb.GatewayLoad(), after, 0.5) == 0.1


async def test_a_gateway_tells_its_groups_and_its_own_load(start_cluster: Any) -> None:
    async with start_cluster(num_groups=2) as cluster:
        before = overview_of(cluster.models)
        await cluster.openai.completions.create(model="hash", prompt="the cat", max_tokens=8)
        await asyncio.sleep(0.05)
        after = overview_of(cluster.models)
    assert [each.state for each in after.groups] == [pb.Group.SERVING] * 2
    assert sum(each.num_prompt_tokens for each in after.groups) > 0
    assert is_busy(before, after)
    assert sum(after.gateway.ttft_counts) == sum(before.gateway.ttft_counts) + 1
    assert len(after.gateway.ttft_counts) == len(after.gateway.ttft_bounds_s) + 1


async def test_top_shows_each_group_once(
    start_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_cluster(num_groups=2) as cluster:
        asked = ["top", "--address", cluster.grpc_address, "--once", "--interval-s", "0.05"]
        assert await asyncio.to_thread(main, asked) == 0
        shown = capsys.readouterr().out
        for name in cluster.groups:
            assert len(re.findall(rf"^{name} .* serving ", shown, re.MULTILINE)) == 1
    assert shown.startswith("2 of 2 groups, 0 running, 0 waiting")


def test_groups_of_one_model_fit_into_a_terminal_of_80_columns() -> None:
    busy = {
        "num_running": 128,
        "num_waiting": 999,
        "num_pending_prefill_tokens": 99_999,
        "num_held_blocks": 99,
        "num_cached_blocks": 99,
    }
    groups = [group(f"abcdefg{number}", model="org/name", **busy) for number in range(2)]
    before = pb.ListGroupsResponse(groups=groups)
    for each in groups:
        each.num_prompt_tokens, each.num_hit_tokens, each.num_output_tokens = 9_999, 9_999, 9_999
    shown = top.frame(before, pb.ListGroupsResponse(groups=groups), interval_s=1)
    *_, head, _, _ = shown.splitlines()
    assert "org/name" not in shown
    assert "9,999" in shown
    assert max(map(len, shown.partition(head)[2].splitlines())) <= 80
    groups[1].model = "another"
    assert "another" in top.frame(before, pb.ListGroupsResponse(groups=groups), interval_s=1)


@pytest.mark.parametrize(
    ("command", "name"), [("status", "a Ray cluster"), ("run-batch", "in OpenAI's batch format")]
)
def test_help_writes_names_as_their_owners_do(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert name in " ".join(capsys.readouterr().out.split())


def test_a_group_in_trouble_has_its_row() -> None:
    lost = pb.Group(address="10.0.0.1:1", state=pb.Group.UNREACHABLE, trouble="no route")
    shown = top.frame(pb.ListGroupsResponse(), pb.ListGroupsResponse(groups=[lost]), interval_s=1)
    assert "unreachable: no route" in shown
    assert "no group is known" in top.frame(
        pb.ListGroupsResponse(), pb.ListGroupsResponse(), interval_s=1
    )


def test_a_group_that_is_gone_is_missed_until_another_takes_its_place() -> None:
    seen = pb.ListGroupsResponse(groups=[group("a")], num_groups=2)
    assert top.frame(seen, seen, interval_s=1).startswith("1 of 2 groups")


class Terminal(io.StringIO):
    def __init__(self, *, is_live: bool) -> None:
        super().__init__()
        self._is_live = is_live

    def isatty(self) -> bool:
        return self._is_live


@pytest.mark.parametrize("is_live", [False, True])
def test_the_status_is_one_line_of_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_live: bool
) -> None:
    screen = Terminal(is_live=is_live)
    monkeypatch.setattr("sys.stdout", screen)
    looks = 0

    def look() -> pb.ListGroupsResponse:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise RuntimeError("a gateway is replaced")
        tokens = min(looks, 4)
        return pb.ListGroupsResponse(groups=[group("a", num_output_tokens=tokens)])

    with StatusLine(look, every_s=0.01):
        while looks < 8:
            time.sleep(0.01)
    shown = screen.getvalue()
    if is_live:
        assert "\n" not in shown
        assert shown.endswith(ERASE)
    else:
        # Nothing ran from the fourth sample on.
        assert all("1 of 1 groups" in line for line in shown.splitlines())
        assert 1 <= len(shown.splitlines()) <= 3


def test_a_status_that_is_off_asks_nobody() -> None:
    def look() -> pb.ListGroupsResponse:
        raise AssertionError

    with StatusLine(look, every_s=0):
        pass


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    return tmp_path


def test_logs_of_a_start_are_in_the_order_of_time(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (state / "logs" / name / "serve" for name in ("20250101-1", "20260101-1"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    (old / "replica_m_Gateway_old.log").write_text("INFO 2025-01-01 00:00:00,000 old\n")
    (new / "replica_m_Gateway_g1.log").write_text(
        "INFO 2026-01-01 00:00:01,000 first\nINFO 2026-01-01 00:00:03,000 third\n  with more\n"
    )
    (new / "replica_m:m_ReplicaGroup_r1.log").write_text("INFO 2026-01-01 00:00:02,000 second\n")
    assert main(["logs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "gateway g1",
        "group r1",
        *["gateway g1"] * 2,
    ]
    assert [line.split()[-1] for line in lines] == ["first", "second", "third", "more"]
    main(["logs", "-n", "1"])
    assert capsys.readouterr().out.split() == ["gateway", "g1", "with", "more"]
    main(["logs", "--of", "r1", "20260101-1"])
    assert capsys.readouterr().out.split()[-1] == "second"
    main(["logs", "--list"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["20250101-1", "ended"],
        ["20260101-1", "ended"],
    ]


def test_logs_that_are_not_there_are_named(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs"]) == 2
    assert "has no logs" in capsys.readouterr().err
    (state / "logs" / "20260101-1" / "serve").mkdir(parents=True)
    assert main(["logs", "other"]) == 2
    assert "there are 20260101-1" in capsys.readouterr().err
    assert main(["logs", "--of", "x"]) == 2
    assert "has no log of it" in capsys.readouterr().err


def test_the_newest_cluster_that_runs_here_is_found(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(state))
    with pytest.raises(ConfigError, match="no `quire serve` runs on this machine"):
        local.found_address("auto")
    logs = state / "some"
    logs.mkdir()
    with kept_logs.kept(logs) as folder:
        kept_logs.note_address(folder, "127.0.0.1:7")
        assert local.found_address("auto") == "127.0.0.1:7"
        assert local.found_address("10.0.0.1:1") == "10.0.0.1:1"
    with pytest.raises(ConfigError):
        local.found_address("auto")


@pytest.mark.parametrize("command", [["serve"], ["demo"], ["run-batch"]])
def test_auto_finds_the_same_cluster_for_commands_that_start_one(
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(state))
    if command == ["run-batch"]:
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}
        (state / "in").write_text(json.dumps(line | {"body": {"prompt": "a"}}))
        command = [*command, "-i", str(state / "in"), "-o", str(state / "out")]
    for named, said in (("", "no `quire serve` runs on this machine"), ("127.0.0.1:1", "there (")):
        monkeypatch.setenv("RAY_ADDRESS", named)
        assert main([*command, "--ray-address", "auto"]) == 2
        assert said in capsys.readouterr().err


def test_nothing_runs_is_told_with_a_status_of_its_own(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(state))
    assert main(["status"]) == 2
    assert capsys.readouterr().out.startswith("Nothing runs: ")


def test_versions_and_help_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert {"quire", "python", "torch", "ray"} <= json.loads(capsys.readouterr().out).keys()
    assert main(["help", "model", "add"]) == 0
    assert capsys.readouterr().out.startswith("usage: quire model add")
    assert main(["help", "nothing"]) == 2
    assert "is no command" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "expected"), [(["serv"], {"serve"}), (["serve", "--max-model"], {"--max-model-len"})]
)
def test_bash_completes_commands_and_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], expected: set[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "quire.bash"
    script.write_text(
        f"{capsys.readouterr().out}\nCOMP_WORDS=(quire {' '.join(words)})\n"
        f'COMP_CWORD={len(words)}\n_shtab_quire\necho "${{COMPREPLY[@]}}"\n'
    )
    answer = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=True)
    assert set(answer.stdout.split()) == expected
