"""Settings come from flags, the environment, a file and defaults, and are printed."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cluster.cli.cluster import cluster_config
from quire.cluster.cli.commands import command_line
from quire.cluster.cli.environment import OTHERS, variable_of
from quire.cluster.cli.main import main
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.kept_keys import kept_keys
from quire.cluster.edge.auth import ApiKeys
from quire.worker.request.errors import ConfigError


def config_of(*flags: str) -> ClusterConfig:
    return cluster_config(command_line().parse_args(["serve", *flags]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "quire.yaml"
    path.write_text("http_port: 1\ngrpc_port: 2\nmetrics_port: 3\nengine: {max_num_seqs: 4}\n")
    return path


def test_a_flag_comes_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HTTP_PORT", "11")
    monkeypatch.setenv("QUIRE_GRPC_PORT", "12")
    config = config_of("--config", str(file), "--http-port", "21")
    assert (config.http_port, config.grpc_port, config.metrics_port) == (21, 12, 3)
    assert config.engine.max_num_seqs == 4
    assert config.engine.block_size == ClusterConfig(engine=config.engine).engine.block_size


def test_the_environment_names_the_file_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    assert config_of().metrics_port == 3


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("QUIRE_ENFORCE_EAGER", "yes", "engine.enforce_eager", True),
        ("QUIRE_ENABLE_PREFIX_CACHING", "0", "engine.enable_prefix_caching", False),
        ("QUIRE_ACCESS_LOG", "off", "access_log", False),
        ("QUIRE_SERVED_MODEL_NAME", "a 'b c'", "aliases", ("b c",)),
        ("QUIRE_ALLOW_ORIGIN", "http://a http://b", "allow_origins", ("http://a", "http://b")),
        ("QUIRE_MAX_MODEL_LEN", "64", "engine.max_model_len", 64),
        ("QUIRE_MAX_MODEL_LEN", "", "engine.max_model_len", None),
        ("QUIRE_HTTP_PORT", "tcp://10.0.0.1:80", "http_port", 8000),
    ],
)
def test_variables_are_read_as_flags_are(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    found: object = config_of()
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("QUIRE_HTTP_PORT", "x", "QUIRE_HTTP_PORT='x': invalid int value"),
        ("QUIRE_ENFORCE_EAGER", "maybe", "QUIRE_ENFORCE_EAGER='maybe': must be one of 1, true"),
        ("QUIRE_BLOCK_SIZE", "24", "QUIRE_BLOCK_SIZE='24': invalid choice"),
        ("QUIRE_ALLOW_ORIGIN", "'a", "QUIRE_ALLOW_ORIGIN: must be words as in a shell"),
    ],
)
def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    text: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(SystemExit):
        config_of()
    assert message in capsys.readouterr().err


def test_a_misspelt_variable_is_told_of_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("QUIRE_TEAM", "red")
    for name in OTHERS:
        monkeypatch.setenv(name, "/nowhere")
    config_of()
    told = capsys.readouterr().err
    assert told.splitlines() == [
        "quire serve: QUIRE_MAX_NUM_SEQ is no setting: is QUIRE_MAX_NUM_SEQS meant?"
    ]


def test_no_two_flags_have_one_variable() -> None:
    commands: Any = command_line()._subparsers
    serve = commands._group_actions[0].choices["serve"]
    variables = [name for action in serve._actions if (name := variable_of(action))]
    assert len(variables) == len(set(variables))
    assert not OTHERS & set(variables)


def test_a_file_may_have_flags_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("max-model-len: 128\nport: 9\ntensor-parallel-size: 2\nenforce-eager: true\n")
    config = config_of("--config", str(path))
    assert (config.engine.max_model_len, config.http_port) == (128, 9)
    assert (config.engine.tensor_parallel_size, config.engine.enforce_eager) == (2, True)
    path.write_text("max-modl-len: 128\n")
    with pytest.raises(ConfigError, match="max-modl-len: unknown"):
        config_of("--config", str(path))


def test_a_switch_that_is_not_off_is_on(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("no-access-log: false\nno-enable-prefix-caching: true\n")
    config = config_of("--config", str(file))
    assert config.access_log
    assert not config.engine.enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_porrt: 1", "http_porrt: unknown; .*; is http_port meant?"),
        ("max-modl-len: 1", "max-modl-len: unknown; .*; is engine.max_model_len meant?"),
        ("models: {a: {http_port: 1}}", "models.a.http_port: unknown for a model"),
        ("models: [a]", "models=.*: must be a mapping of names"),
        ("- a", "must be a mapping of settings"),
        ("{", "cannot be read as YAML: "),
        ("more_models: []", "more_models: name each model under `models`"),
        ("models: {a: }", "models.a has no model: name a folder, "),
        ("model: a/b\nrevision: main", "revision=main: spell the model MODEL@main"),
        ("port: many", "^http_port='many': Input should be a valid integer"),
        ("models: {a: {engine: {model: /m}}, b: {num_groups: 2}}", "models.b has no model"),
        ("models: {a: {model: /m}}", "models.a.model: unknown .*; is engine.model meant?"),
        ("http_port: 1\ngrpc_port: 2\nhttp_port: 3", "'http_port' stands twice, in lines 1 and 3"),
        ("http_port: 1\n'http_port': 1", "'http_port' stands twice, in lines 1 and 2"),
        ("models:\n  a: {engine: {model: /m}}\n  a: {}", "'a' stands twice, in lines 2 and 3"),
        ('{"engine": {"block_size": 8,\n"block_size": 16}}', "'block_size' .* lines 1 and 2"),
        ("chat_template: true", "chat_template=True: Input should be a valid string"),
        ("allowed-origins: 1", "--allowed-origins 1: must be a JSON list"),
        ("no-grpc_port: true", "no-grpc_port: unknown"),
        ("no-access-log: 'false'", "no-access-log='false': must be true or false"),
        ("max-num-seqs: true", "engine.max_num_seqs=True: must be a number"),
        ("num_groups: true", "num_groups=True: must be a number"),
        ("api-key: []", r"api-key=\[\]: must be text, or a list of texts"),
        ("api-key: null", "api-key=None: must be text, or a list of texts"),
        ("model: [a, true]", "must be text, or a list of texts"),
    ],
)
def test_a_file_that_cannot_work_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        config_of("--config", str(path))


def test_printed_settings_are_a_file_that_gives_them_again(
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "64")
    flags = ["--config", str(file), "--routing-policy", "round_robin", "--max-groups", "3"]
    assert main(["serve", *flags, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "max_model_len: 64  # QUIRE_MAX_MODEL_LEN" in printed
    assert 'policy: "round_robin"  # --routing-policy' in printed
    assert f"metrics_port: 3  # {file}" in printed
    assert "# default" not in printed
    expected = config_of(*flags)
    monkeypatch.delenv("QUIRE_MAX_MODEL_LEN")
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert config_of("--config", str(again)) == expected
    assert main(["serve", "--config", str(again), "--print-config=all"]) == 0
    whole = capsys.readouterr().out
    assert "# default" in whole
    again.write_text(whole)
    assert config_of("--config", str(again)) == expected


@pytest.mark.parametrize("asked", ["--print-config", "--print-config=all"])
def test_printed_settings_of_several_models_give_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        """
        http_port: 8001
        engine: {max_num_seqs: 64}
        models:
          org/large: {engine: {model: /m/large, tensor_parallel_size: 2}, aliases: [gpt-4]}
          small: {engine: {model: /m/small}, num_groups: 2}
        """
    )
    flags = ["--config", str(file), "--max-model-len", "128"]
    assert main(["serve", *flags, asked]) == 0
    printed = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    expected = config_of(*flags)
    assert config_of("--config", str(again)) == expected
    read = yaml.safe_load(printed)
    assert list(read["models"]) == ["org/large", "small"]
    assert printed.count(f"max_num_seqs: 64  # {file}") == 2
    assert printed.count("max_model_len: 128  # --max-model-len") == 2
    assert f"num_groups: 1  # {file}" not in printed
    assert main(["serve", "/m/a", "/m/b", asked]) == 0
    again.write_text(capsys.readouterr().out)
    models = config_of("--config", str(again)).models
    assert {name: str(each.engine.model) for name, each in models.items()} == {
        "a": "/m/a",
        "b": "/m/b",
    }


def test_without_settings_what_is_printed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print-config"]) == 0
    assert capsys.readouterr().out.startswith("# All settings are at their defaults")


def test_a_key_on_the_command_line_holds_beside_a_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    config = config_of("--config", str(file), "--api-key", "secret")
    assert config.api_keys_file is not None
    with kept_keys(["secret"]):
        assert ApiKeys.load(config.api_keys_file).caller("Bearer secret")


def test_no_key_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("QUIRE_API_KEYS", "very-secret")
    main(["serve", "--print-config=all"])
    printed = capsys.readouterr().out
    assert "very-secret" not in printed
    assert "# API keys are left out" in printed
    assert "api_keys_file" not in yaml.safe_load(printed)
    assert not list(tmp_path.iterdir())


def test_each_origin_is_a_flag_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "org/m", "--allow-origin", "*", "--no-directory", "--print-config"])
    lines = capsys.readouterr().out.splitlines()
    assert 'allow_origins: ["*"]  # --allow-origin' in lines
    assert "  use_directory: false  # --no-directory" in lines
    assert 'served_model_name: "org/m"  # follows from the others' in lines
