"""Logs of ended clusters are kept, within bounds."""

import os
from pathlib import Path

import pytest

from quire.cluster.deploy import kept_logs
from quire.cluster.deploy.kept_logs import kept, logs_named
from quire.worker.request.errors import ConfigError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_what_a_cluster_logged_is_there_after_it_failed(tmp_path: Path) -> None:
    logs = tmp_path / "ray" / "logs"
    error = RuntimeError()

    def fail() -> None:
        (logs / "serve").mkdir(parents=True)
        (logs / "serve" / "replica.log").write_text("why")
        (logs / "empty.log").touch()
        (live,) = (tmp_path / "state" / "logs").glob("*/live")
        assert (live / "serve" / "replica.log").read_text() == "why"
        raise error

    with pytest.raises(RuntimeError), kept(logs) as folder, logs_named(folder):
        fail()
    assert folder is not None
    assert error.__notes__ == [f"logs: {folder}"]
    left = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert left == ["serve/replica.log"]
    assert folder.stat().st_mode & 0o077 == 0


def test_errors_of_some_kinds_name_no_logs() -> None:
    error = ConfigError("name='x': there is none")
    with pytest.raises(ConfigError), logs_named("somewhere", but=(ConfigError,)):
        raise error
    assert not hasattr(error, "__notes__")


def test_a_file_that_cannot_be_copied_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    with kept(tmp_path) as folder:
        assert folder is not None
        (folder / "b").mkdir()
    assert [(folder / name).read_text() for name in "ac"] == ["a", "c"]
    assert "not all logs are kept" in caplog.text


def test_of_a_long_file_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_logs, "_MAX_FILE_BYTES", 4)
    with kept(tmp_path) as folder:
        (tmp_path / "a.log").write_text("0123456789")
    assert folder is not None
    assert (folder / "a.log").read_text() == "6789"


@pytest.mark.parametrize(("name", "limit"), [("_MAX_FOLDERS", 3), ("_MAX_BYTES", 350)])
def test_the_oldest_folders_go_and_those_of_running_clusters_stay(
    state: Path, tmp_path: Path, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_logs, name, limit)
    ended = 2**22 + 1  # No process has this id.
    for number in range(8):
        pid = os.getppid() if number == 2 else ended + number
        folder = state / "logs" / f"2020-{number}-{pid}"
        folder.mkdir(parents=True)
        (folder / "a.log").write_text("x" * 100)
        os.utime(folder, (number, number))
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log").write_text("x" * 100)
    with kept(logs) as new:
        pass
    assert new is not None
    left = {path.name.split("-")[1] for path in (state / "logs").iterdir() if path != new}
    assert left == {"2", "6", "7"}
    assert (new / "a.log").exists()


def test_a_start_goes_on_where_no_logs_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "file"))
    with kept(tmp_path) as folder:
        assert folder is None
    assert "QUIRE_STATE_DIR names another folder" in caplog.text
