import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire.cluster.cli.cluster import cluster_config, model_config
from quire.cluster.cli.commands import command_line
from quire.cluster.cli.main import main
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy import app
from quire.cluster.errors import StartFailed
from quire.worker.request.errors import ConfigError

FREE_PORTS = ["--grpc-port", "0", "--http-port", "0"]


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("serve", "demo", "generate"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--block-size", "24"], "block-size"),
        (["serve", "/nowhere"], "/nowhere"),
        (["serve", "--host", "192.0.2.7"], "--host 192.0.2.7: not an address of this machine"),
        (["serve", *FREE_PORTS, "-tp", "2", "--nodes-per-group", "2"], "has one node"),
        (["serve", "--ray-address", "127.0.0.1:1"], "127.0.0.1:1: nothing answers there"),
        (["serve", "--ray-address", "foo"], "--ray-address foo: no Ray cluster is there"),
        (["serve", "--num-groups", "0"], "--num-groups 0: must be 1 or more"),
        (["serve", "--min-groups", "0"], "--min-groups: --max-groups must say"),
        (["serve", "--min-groups", "3", "--max-groups", "2"], "--max-groups 2: must be"),
        (["serve", "--grpc-port", "70000"], "--grpc-port 70000: must be a port"),
        (["serve", "--grpc-port", "8000"], "both 8000: they must differ"),
        (["serve", "-tp", "3"], "3"),
        (["serve", *FREE_PORTS, "--api-keys-file", "/nowhere"], "quire: --api-keys-file /nowhere"),
        (
            ["serve", *FREE_PORTS, "--tls-certificate", "/nowhere", "--tls-key", "/nowhere"],
            "quire: --tls-certificate /nowhere",
        ),
        (["serve", "--routing-policy", "fastest"], "'fastest' (choose from 'prefix_aware', "),
        (["servee"], "is serve meant?"),
        (["keys", "lists"], "is list meant?"),
        (["serve", "--routing-policy", "prefix-aware"], "is prefix_aware meant?"),
        (["serve", "--allow-origin", "localhost"], "--allow-origin localhost: must be '*' or"),
        (["serve", "--max-queue-wait-s", "-1"], "--max-queue-wait-s -1.0: must be 0 or more"),
        (["serve", "--max-queued-requests", "0"], "--max-queued-requests 0: must be 1 or more"),
        (["serve", "--max-group-deaths", "1"], "--max-group-deaths 1: must be 2 or more"),
        (["serve", "--step-deadline-s", "0"], "--step-deadline-s 0.0: must be above 0"),
        (["serve", "-tp", "2", "--nodes-per-group", "3"], "--nodes-per-group 3: must divide"),
        (["serve", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "--max-num-seqs (9)"),
        (["serve", "--quantization", "int8", "--device", "cuda"], "set --device cpu"),
        (["serve", "--kv-cache-dtype", "int4"], "kv-cache-dtype"),
        (["demo", "--gpu-memory-utilization", "2"], "--kv-cache-memory-bytes"),
        (["generate", "hi", "--max-tokens", "-5"], "max_tokens=-5 is out of range: 1 or more"),
        (["generate", "hi", "--seed", "-1"], "seed=-1 is out of range"),
        (["generate", "hi", "--top-p", "7"], "top_p=7.0 is out of range"),
        (["generate", "hi", "--address", "localhost"], "address='localhost': must be host:port"),
        (["generate", "hi", "--address", "[::1]:65536"], "address='[::1]:65536': must be host:"),
        (["generate", "hi", "--address", "http://[::1]:80"], "address='http://[::1]:80': must be"),
        (["demo", "--model", "x"], "--model; MODEL is given without a flag"),
        (["demo", "--model=x"], "--model=x; MODEL is given without a flag"),
        (["serve", "--model", "/nowhere/x"], "/nowhere/x: no such directory"),
        (
            ["serve", "/nowhere/x.gguf"],
            "no such file; model must be a GGUF file or a checkpoint directory",
        ),
        (["serve", __file__], "a file, not a directory; model must be a GGUF file or a"),
        (["serve", "--num-group", "2"], "unrecognized arguments: --num-group (is --num-groups me"),
        (["bench", "prefix", "--block-size=8"], "--block-size=8 (is --block-sizes meant?); `quire"),
        (["explain", "--limit", "0"], "limit=0: must be 1 or more"),
        (["logs", "-n", "-5"], "'-5' must be a whole number of 0 or more"),
        (["doctor", "--http-port", "65536"], "'65536' must be a whole number from 0 to 65535"),
        (["simulate", "/nowhere"], "/nowhere: No such file or directory; give the path of a trace"),
        (["simulate", "x", "--speed", "nan"], "argument --speed: 'nan' is no finite number"),
        (["simulate", "x", "--link", "fast"], "link='fast': must be one of none, 25g, 100g"),
        (["simulate", "x", "--event-lag-s", "-1"], "event_lag_s=-1.0: must not be negative"),
        (["serve", "--step-deadline-s", "nan"], "--step-deadline-s nan: must be above 0"),
        (["serve", "--drain-timeout-s", "inf"], "--drain-timeout-s inf: must be 0 or more, and f"),
        (["serve", "--max-groups", "2", "--target-ttft-s", "nan"], "--target-ttft-s nan: must"),
        (["generate", "hi", "--system", "a\udcff"], "system: is not UTF-8 at character 1"),
        (["bench", "prefix", "--output", "/nowhere/x"], "no folder /nowhere: make it"),
        (["simulate", "trace.jsonl", "--format", "foo"], "'foo' (choose from 'mooncake'"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as exited:  # argparse's own refusals.
        status = exited.code
    assert status == 2
    assert message in capsys.readouterr().err


def failing_with(error: Exception) -> Callable[..., int]:
    def fail(*_: object, **__: object) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("x=1: must be 2"), 2, "quire: x=1: must be 2\n"),
        (StartFailed("it died"), 1, "quire: it died\n"),
        (OSError(28, "No space left on device", "out.json"), 1, "quire: out.json: No space left"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_the_exit_status_tells_bad_usage_from_failure(
    error: Exception,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, "serve_until_signal", failing_with(error))
    with open(os.dup(1), "w") as stdout:  # The reader of a broken pipe is gone for good.
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["serve"]) == status
    err = capfd.readouterr().err
    assert err.startswith(said)
    assert bool(err) == bool(said)


def test_a_prompt_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert main(["generate", "-"]) == 2
    assert "quire: prompt: is not UTF-8 at character 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["serve", "--sed", "1"], ["simulate"], ["bench", "prefix", "-x"]]
)
def test_a_refusal_is_one_line_and_says_where_to_read_on(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    command = " ".join(each for each in ["quire", *arguments] if each not in ("--sed", "1", "-x"))
    assert line.endswith(f"; `{command} --help` says what there is")


BOUNDS = {
    "max_queue_wait_s": 7.0,
    "max_queued_requests": 5,
    "max_queued_bytes": 6,
    "max_inflight": 7,
    "silence_timeout_s": 4.0,
    "step_deadline_s": 8.0,
    "max_group_deaths": 9,
    "drain_timeout_s": 11.0,
    "handover_s": 2.0,
    "nodes_per_group": 2,
    "cpus_per_group": 4.0,
    "chat_template": "{{ messages }}",
}


def test_a_chat_template_is_a_file_or_written_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[ClusterConfig] = []
    monkeypatch.setattr(app, "serve_until_signal", lambda config, **_: served.append(config))
    file = tmp_path / "template.jinja"
    file.write_text("no braces")
    assert main(["serve", "--chat-template", str(file)]) == 0
    assert served[0].chat_template == "no braces"
    assert main(["serve", "--chat-template", str(tmp_path / "missing")]) == 2
    assert "missing: cannot be read as text" in capsys.readouterr().err


def test_flags_reach_the_cluster_and_without_them_its_own_defaults_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[ClusterConfig] = []
    monkeypatch.setattr(app, "serve_until_signal", lambda config, **_: served.append(config))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in BOUNDS.items()]
    flags.append("--scheduling-policy=fcfs")
    flags += ["--allow-origin", "*", "--allow-origin=http://localhost:3000"]
    assert main(["serve", "-tp", "2"]) == main(["serve", "-tp", "2", *flags]) == 0
    plain, bounded = served
    own = ClusterConfig(engine=plain.engine, served_model_name=plain.served_model_name)
    assert plain == own
    own = replace(own, engine=replace(own.engine, scheduling_policy="fcfs"))
    own = replace(own, allow_origins=("*", "http://localhost:3000"))
    assert bounded == replace(own, **BOUNDS)  # type: ignore[arg-type]


def test_several_models_are_served_with_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("m/a", "m/b", "n/a"):
        Path(folder).mkdir(parents=True)
    served: list[ClusterConfig] = []
    monkeypatch.setattr(app, "serve_until_signal", lambda config, **_: served.append(config))
    name = "--served-model-name"
    assert main(["serve", "./m/a", "./m/b", "--block-size", "32", "--num-groups", "2"]) == 0
    assert main(["serve", "./m/a", "./m/b", name, "x", name, "y"]) == 0
    assert main(["serve", "./m/a", name, "x", name, "y", name, "z"]) == 0
    plain, named, aliased = served
    assert [*plain.models] == ["a", "b"]
    for path, config in zip(("./m/a", "./m/b"), plain.models.values(), strict=True):
        assert (config.engine.model, config.engine.block_size) == (Path(path), 32)
        assert config.num_groups == 2
    assert [*named.models] == ["x", "y"]
    assert [*aliased.models] == ["x"]
    assert aliased.aliases == ("y", "z")
    for flags, why in (
        (["./m/a", "./m/b", name, "x"], "is given 1 times for 2 models"),
        (["./m/a", "./n/a"], "two models are called 'a'"),
        (["./m/a", name, "x", name, "x"], "two models are called 'x'"),
    ):
        assert main(["serve", *flags]) == 2
        assert why in capsys.readouterr().err


def test_on_a_cluster_of_several_nodes_groups_can_be_reached_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[ClusterConfig] = []
    monkeypatch.setattr(app, "serve_until_signal", lambda config, **_: served.append(config))
    for flags in ([], ["--ray-address", "auto"], ["--ray-address=auto", "--group-host=10.0.0.1"]):
        assert main(["serve", *flags]) == 0
    assert [config.group_host for config in served] == ["127.0.0.1", "auto", "10.0.0.1"]


@pytest.mark.parametrize("command", ["serve", "demo", "generate", "explain", "simulate"])
def test_help_shows_no_default_where_there_is_none(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    for nothing in ("None", "False", ")"):
        assert f"default: {nothing}" not in shown


WITHOUT_EXTRA = """
import sys
for name in ("google.protobuf", "grpc", "prometheus_client", "pydantic", "ray", "starlette"):
    sys.modules[name] = None  # Python then says that there is no such module.
from quire.cluster.cli.cluster import cluster_config, model_config
from quire.cluster.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


def without_the_extra(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_EXTRA, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize(
    "command", [["serve"], ["demo"], ["generate", "hi"], ["explain"], ["admin", "list"]]
)
def test_without_the_cluster_s_packages_it_is_said_what_to_install(command: list[str]) -> None:
    ended = without_the_extra(*command)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("quire: ")
    assert "is not installed" in line
    assert "pip install 'quire-serve[cluster]'" in line
    assert "pip install '.[cluster]'" in line


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    "command", ["serve", "demo", "generate", "explain", "admin", "bench", "simulate"]
)
def test_help_needs_no_package_of_the_cluster(command: str) -> None:
    ended = without_the_extra(command, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_every_flag_says_what_it_is_for() -> None:
    silent, parsers = [], [command_line()]
    for parser in parsers:  # Which grows: a command may have commands of its own.
        for action in parser._actions:
            if isinstance(action.choices, dict):
                parsers += action.choices.values()
            if action.option_strings and not action.help:
                silent.append((parser.prog, action.option_strings))
    assert len(parsers) > 8
    assert not silent


@pytest.mark.parametrize("key", ["two\nlines", "clé"])
def test_an_api_key_that_cannot_be_sent_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", key)
    assert main(["generate", "hello", "--address", "127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quire: api_key: has characters that cannot be sent")
    assert key not in said


@pytest.mark.parametrize("command", [["generate", "hello"], ["explain"], ["admin", "list"]])
def test_a_server_that_is_not_there_is_named(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--address", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "127.0.0.1:1: UNAVAILABLE" in said
    assert "does `quire serve` run there?" in said


def test_a_file_has_settings_of_the_cluster_and_of_each_model_and_flags_come_first(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        """
        http_port: 9000
        grpc_port: 9001
        max_inflight: 100
        engine: {max_num_seqs: 8, block_size: 32, dtype: float32}
        models:
          large: {engine: {model: /models/large, max_num_seqs: 64}, aliases: [gpt-4]}
          org/small: {engine: {model: /models/small}, num_groups: 2, max_inflight: 7}
        """
    )
    flags = [
        "serve",
        "--config",
        str(file),
        "--http-port",
        "8000",
        "--max-num-batched-tokens",
        "99",
    ]
    config = cluster_config(command_line().parse_args(flags))
    large, small = config.models.values()
    assert list(config.models) == ["large", "org/small"]
    assert (config.http_port, config.grpc_port) == (8000, 9001)
    assert [str(each.engine.model) for each in (large, small)] == ["/models/large", "/models/small"]
    assert [each.engine.max_num_seqs for each in (large, small)] == [64, 8]
    assert [each.engine.max_num_batched_tokens for each in (large, small)] == [99, 99]
    assert [each.engine.block_size for each in (large, small)] == [32, 32]
    assert [each.num_groups for each in (large, small)] == [1, 2]
    assert [each.max_inflight for each in (large, small)] == [100, 7]
    assert large.aliases == ("gpt-4",)

    with pytest.raises(ConfigError, match=r"models\.org/small is none of the models given: large"):
        cluster_config(command_line().parse_args([*flags, "/other/large"]))
    names = ["--served-model-name", "large", "--served-model-name", "org/small"]
    given = cluster_config(command_line().parse_args([*flags, *names, "/other/large", "/x"]))
    assert [str(each.engine.model) for each in given.models.values()] == ["/other/large", "/x"]
    assert given.models["org/small"].num_groups == 2


def test_a_model_that_is_added_takes_the_flags_that_are_its_own() -> None:
    flags = [
        "--served-model-name",
        "a",
        "--served-model-name",
        "b",
        "--max-groups",
        "3",
        "-tp",
        "2",
    ]
    arguments = command_line().parse_args(["model", "add", "/models/m", "--name", "chats", *flags])
    config = model_config(arguments)
    assert (config.model_name, config.aliases) == ("a", ("b",))
    assert config.max_groups == 3
    assert config.engine.tensor_parallel_size == 2
    with pytest.raises(SystemExit):
        command_line().parse_args(["model", "add", "/models/m", "--name", "c", "--http-port", "1"])
    with pytest.raises(SystemExit):
        command_line().parse_args(["model", "remove", "m"])
