"""Each flag of vLLM's command line works or is refused with a reason."""

import argparse
import stat
from pathlib import Path

import pytest

from quire.cluster.cli.cluster import cluster_config
from quire.cluster.cli.commands import command_line
from quire.cluster.cli.main import main
from quire.cluster.cli.vllm_flags import translated
from quire.cluster.deploy.kept_keys import kept_keys
from quire.cluster.edge.auth import ApiKeys
from quire.worker.request.errors import ConfigError
from quire.worker.request.vllm_names import ALWAYS, REFUSED, SPELLED

FLAGS = Path(__file__).with_name("vllm_flags.txt").read_text(encoding="ascii").split()
"""Flags of ``vllm serve`` in release 0.33.0."""
CHUNKED = "--enable-chunked-prefill"
BY_HAND = {"--model", "--revision", "--allowed-origins"}


def own_flags() -> set[str]:
    (commands,) = (
        each for each in command_line()._actions if isinstance(each, argparse._SubParsersAction)
    )
    return {flag for each in commands.choices["serve"]._actions for flag in each.option_strings}


def ours(*arguments: str) -> list[str]:
    return translated(arguments, own_flags())[0]


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_is_known_once(flag: str) -> None:
    tables = (own_flags(), SPELLED, ALWAYS, REFUSED, BY_HAND)
    assert sum(flag in table for table in tables) == 1


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_what_we_have_not_is_refused_with_a_sentence(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} of vLLM is not served: .{{12}}"):
        ours("m", flag, "x")


def test_the_usual_command_means_the_same() -> None:
    given = ["--model", "m", "--revision", "r", "--port", "1", "-tp", "2", "--dtype", "half"]
    expected = ["m@r", "--http-port", "1", "-tp", "2", "--dtype", "float16", "--max-model-len=9"]
    assert ours(*given, "--max_model_len=9") == expected
    assert ours("m", "--revision=r", "--allowed-origins", '["a","b"]') == [
        *("m@r", "--allow-origin", "a", "--allow-origin", "b")
    ]


def test_every_spelling_is_of_a_flag_of_ours() -> None:
    assert set(SPELLED.values()) <= own_flags()


def test_what_is_always_so_is_noted_and_its_contrary_refused() -> None:
    arguments, notes = translated(["m", CHUNKED], own_flags())
    assert arguments == ["m"]
    assert notes == [f"{CHUNKED} changes nothing: prompts are always computed in chunks"]
    with pytest.raises(ConfigError, match="always computed in chunks"):
        ours("--no-enable-chunked-prefill")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port"], "--port: a value must follow"),
        (["--revision", "r"], "spell the model MODEL@r"),
        (["--allowed-origins", "*"], "must be a JSON list"),
    ],
)
def test_a_broken_command_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ours(*arguments)


def test_no_flag_is_guessed_that_is_not_nearly_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, guess in (("--tokeniser", False), ("--num-group", True)):
        with pytest.raises(SystemExit):
            main(["serve", flag, "x"])
        assert ("meant?" in capsys.readouterr().err) is guess


def test_keys_of_the_command_line_are_kept_hashed_while_they_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))
    given = ["first-key", "second-key"]
    config = cluster_config(command_line().parse_args(["serve", "m", "--api-key", *given]))
    file = config.api_keys_file
    assert file is not None
    assert not file.parent.exists()
    left = file.with_name("4194305")  # Above the greatest id of a process.
    file.parent.mkdir()
    left.touch()
    with kept_keys(given):
        assert list(file.parent.iterdir()) == [file]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert not [key for key in given if key in file.read_text()]
        keys = ApiKeys.load(file)
        callers = [keys.caller(f"Bearer {key}") for key in given]
        assert None not in callers
        assert len({caller.tenant for caller in callers if caller}) == 2
    assert not list(file.parent.iterdir())


def test_a_state_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="QUIRE_STATE_DIR names another"), kept_keys(["a"]):
        pass


def test_keys_of_the_command_line_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match="is empty, has a space"):
        cluster_config(command_line().parse_args(["serve", "m", "--api-key", "a b"]))
    elsewhere = command_line().parse_args(["serve", "m", "--api-key", "a", "--ray-address", "auto"])
    with pytest.raises(ConfigError, match="--api-keys-file"):
        cluster_config(elsewhere)
