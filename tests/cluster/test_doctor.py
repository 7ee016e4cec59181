"""``quire doctor`` says of each thing that serving needs whether it is there."""

import socket
from pathlib import Path

import pytest

from quire import demo_model
from quire.cluster.cli.doctor import Finding, look
from quire.cluster.cli.main import main


def findings(model: Path | None, *ports: int) -> dict[str, Finding]:
    return {each.subject: each for each in look(model, host="127.0.0.1", ports=ports)}


def test_this_machine_and_a_good_model_are_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0"]
    assert main(["doctor", str(demo_model.PATH), *ports]) == 0
    said = capsys.readouterr().out
    assert "BAD" not in said
    assert "layers" in said


def test_a_port_in_use_and_a_model_that_is_not_there_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = findings(tmp_path / "none", port)
    assert not found[f"port {port}"].is_well
    assert "in use" in found[f"port {port}"].said
    assert not found["model"].is_well
    assert "no such directory" in found["model"].said
