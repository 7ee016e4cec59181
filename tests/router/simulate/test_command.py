"""The command ``quire simulate``: its flags, output and files."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quire import demo_model
from quire.cluster.cli.main import main
from quire.cluster.tools.simulate.requests import trace_of_requests
from quire.simulate.capacity import find_capacity
from quire.simulate.cost import PRESETS
from quire.simulate.fit import fit_cost
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace import Row, Trace
from quire.worker.request.errors import ConfigError
from quire.worker.text.tokenizer import Tokenizer


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    lines = [
        {
            "arrival_s": 0.05 * i,
            "num_prompt_tokens": 100 + i,
            "num_output_tokens": 1 + i % 7,
            "blocks": [f"system {i % 3}", f"own {i}"],
        }
        for i in range(200)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench_step(
    path: Path, *, chunk: int, chunk_ms: float, shared: int | None = None, saved: float = 0.0
) -> Path:
    """A row of 100 tokens adds 0.01 ms, less the share ``saved`` of that for shared tokens."""
    rows = [
        (
            f"{batch} decode{'s' * (batch > 1)}",
            1000 * (2 + 0.01 * batch - 0.0001 * (batch - 1) * (shared or 0) * saved),
        )
        for batch in (1, 100)
    ]
    rows += [(f"prefill {chunk}", 1000 * chunk_ms), ("a step of 100 decodes to 2 ranks", 70.0)]
    data = {
        **{"benchmark": "step", "context": 90, "num_steps": 20},
        **({} if shared is None else {"shared_context": shared}),
        "rows": [{"kind": k, "is_async": False, "step": {"median_us": us}} for k, us in rows],
    }
    path.write_text(json.dumps(data))
    return path


@pytest.mark.slow
def test_a_line_per_replay_and_a_file_of_them(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "out"
    argv = ["simulate", str(log), "--format", "log", "--policy", "round_robin", "prefix_aware"]
    argv += ["--num-groups", "2", "4", "--speed", "1", "5", "--output", str(stem)]
    assert main([*argv, "--plot-format", "svg"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("round_robin") == printed.count("prefix_aware") == 4
    assert "µs of CPU per simulated request" in printed
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 8
    assert "<svg" in (tmp_path / "out.svg").read_text()


def num_common(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the common prefix of both."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def test_requests_share_blocks_where_their_prompts_begin_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hints = tmp_path / "requests.jsonl", "Answer in one plain sentence. " * 8
    chat = [{"role": "user", "content": hints}]
    lines = [
        {"arrival_s": 9.5, "prompt": f"{hints}What is a harbor?", "max_tokens": 3},
        {"arrival_s": 7.0, "prompt": f"{hints}What is a ship?"},
        {"arrival_s": 8.0, "messages": chat},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = trace_of_requests(path, model=demo_model.PATH, block_size=8, output_len=5)
    assert trace.arrival_ms == [0, 1000, 2500]
    assert trace.num_output == [5, 5, 3]
    tokenizer = Tokenizer.load(demo_model.PATH)
    ship, harbor = (tokenizer.encode(f"{hints}What is a {it}?") for it in ("ship", "harbor"))
    asked = tokenizer.apply_chat_template(chat)
    assert trace.num_input == [len(ship), len(asked), len(harbor)]
    num_equal = num_common(ship, harbor)
    first, other, last = trace.chains
    assert num_common(first, last) == num_equal // 8 > 2
    assert not set(first) & set(other)

    assert main(["simulate", str(path), "--format", "requests", "--num-groups", "1"]) == 0
    assert "prefix_aware" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("time", "message"), [({}, "request 2: has no arrival_s"), ({"arrival_s": "x"}, "line 2: arr")]
)
def test_a_request_without_its_time_is_named(
    time: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": "a", "arrival_s": 1}, {"prompt": "b", **time}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["simulate", str(path), "--format", "requests"]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_there_is_no_plot_and_all_the_rest(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["simulate", str(log), "--format", "log", "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "no plot: a plot needs matplotlib: pip install matplotlib" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("out*")] == ["out.json"]


def test_a_wrong_value_is_named_with_a_remedy(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--policy", "best"], "policy='best': must be one of prefix_aware"),
        (["--speed", "0"], "speed=0.0: must be above 0; 2 replays twice as fast"),
        (["--shared-read", "1.5"], "shared_read=1.5: must be 0 to 1; 1 where each sequence reads"),
        (["--cost", "b200"], "cost='b200': must be one of h100-8b"),
        (["--fit", "x.json"], "--fit needs --cache-tokens N"),
        (["--num-requests", "0"], "num_requests=0: must be 1 or more"),
        (["--ttft-target-s", "0.000001"], "does not reach it at any speed"),
        (["--chunk-tokens", "0"], "chunk_tokens=0: must be 1 or more"),
        (["--num-groups", "4", "0"], "num_groups=0: must be above 0"),
        (["--block-size", "0"], "block_size=0: must be 1 or more"),
        (["--spread-ms", "-1"], "spread_ms=-1.0: must not be negative"),
        (["--output", "no/such/stem"], "output=no/such/stem: no/such is no folder; make it first"),
    ):
        assert main(["simulate", str(log), "--format", "log", *flags]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        # Errors appear before any replay, except where only a replay reveals them.
        assert "policy" not in printed.out or "--ttft-target-s" in flags


def test_help_shows_defaults_as_one_would_type_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: prefix_aware)" in text
    for word in ("default: None", "default: False", "default: ["):
        assert word not in text


def test_the_fit_goes_through_what_was_measured(tmp_path: Path) -> None:
    one = bench_step(tmp_path / "one.json", chunk=500, chunk_ms=52.0)
    cost = fit_cost([one], num_cache_tokens=100_000)
    # The base is the shortest decode, which is part of the prefill's time.
    assert cost.prefill_ms(500) == pytest.approx(52.0)
    assert cost.base == pytest.approx(2.01)
    assert cost.decode_ms(100) == pytest.approx(2.01)
    assert cost.decode_ms(10_000) == pytest.approx(3.0)
    two = bench_step(tmp_path / "two.json", chunk=100, chunk_ms=12.0)
    cost = fit_cost([one, two], num_cache_tokens=100_000)
    assert cost.base == pytest.approx(2.0)
    assert cost.per_token == pytest.approx(0.1)
    with pytest.raises(ConfigError, match=r"give the JSON of `bench\.step_times`"):
        fit_cost([tmp_path / "absent.json"], num_cache_tokens=1)


def test_what_sharing_saves_is_fitted_to_runs_with_and_without_it(tmp_path: Path) -> None:
    none, most = (
        bench_step(tmp_path / f"{shared}.json", chunk=500, chunk_ms=52.0, shared=shared, saved=0.7)
        for shared in (0, 80)
    )
    cost = fit_cost([none, most], num_cache_tokens=100_000)
    assert cost.shared_read == pytest.approx(0.3)
    assert cost.decode_ms(10_000) == pytest.approx(3.0)
    assert cost.decode_ms(10_000, 99 * 80) == pytest.approx(3 - 0.0001 * 99 * 80 * 0.7)
    # A single measurement cannot be compared.
    assert fit_cost([none], num_cache_tokens=100_000).shared_read == 1
    with pytest.raises(ConfigError, match=r"give one of `bench\.step_times` without --shared"):
        fit_cost([most], num_cache_tokens=100_000)
    # If sharing took longer in a run, it saves nothing.
    slower = bench_step(most, chunk=500, chunk_ms=52.0, shared=80, saved=-0.2)
    assert fit_cost([none, slower], num_cache_tokens=100_000).shared_read == 1


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"benchmark": "step"}',
        '{"benchmark": "step", "rows": [{"kind": "1 decode"}]}',
        '{"benchmark": "step", "rows": [{"kind": "1 decode", "is_async": false, "step": null}]}',
    ],
)
def test_a_file_that_only_looks_like_a_benchmark_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"step\.json: .*; give the JSON of `bench\.step_times`"):
        fit_cost([path], num_cache_tokens=1)


def test_a_fit_by_which_long_prompts_take_negative_time_is_refused(tmp_path: Path) -> None:
    runs = [
        bench_step(tmp_path / f"{chunk}.json", chunk=chunk, chunk_ms=chunk_ms)
        for chunk, chunk_ms in ((16, 12.0), (32, 11.9))
    ]
    # 12.1 ms less 0.00625 ms a token.
    with pytest.raises(ConfigError, match=r"per_token=-0\.00625: must not be negative, .*; fit"):
        fit_cost(runs, num_cache_tokens=100_000)
    for decode_linear in (-5.0, -8.0):
        with pytest.raises(ConfigError, match="decode_base=5, decode_linear=-"):
            replace(PRESETS["cpu-125m"], decode_base=5.0, decode_linear=decode_linear)


def test_capacity_is_the_speed_at_which_the_target_is_just_met() -> None:
    """A request each 100 ms, served in 20 ms, a step each: at speed 5 the group is full."""
    cost = PRESETS["h100-8b"]
    rows = [Row(100.0 * i, 100, 1, ()) for i in range(500)]
    trace = Trace.of(rows, name="clockwork", block_size=32)
    config = SimulationConfig(num_groups=1, cost=cost)
    speed, result = find_capacity(
        lambda speed: simulate(trace.at_speed(speed), config),
        target_s=1.5 * cost.prefill_ms(100) / 1000,
    )
    assert result is not None
    assert result.ttft_quantile_s(0.99) <= 1.5 * cost.prefill_ms(100) / 1000
    assert speed == pytest.approx(100 / cost.prefill_ms(100), rel=0.1)


@pytest.mark.parametrize("link", ["100g", "0.5"])
def test_blocks_travel_over_links_that_are_named_or_given_as_a_rate(
    log: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--format", "log", "--block-size", "16", "--link", link, "--host-tokens", "4096"]
    assert main(["simulate", str(log), *flags, "--policy", "mooncake_fetch"]) == 0
    assert "mooncake_fetch" in capsys.readouterr().out
