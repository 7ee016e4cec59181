"""``quire doctor`` reports for each requirement of serving whether it is met."""

import os
import socket
from pathlib import Path

import pytest
import torch

from quire import demo_model
from quire.cluster.cli.main import main
from quire.cluster.tools.doctor import Finding, look


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


def test_a_cuda_build_without_a_gpu_is_told_how_to_become_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("PATH", "")  # No nvidia-smi.
    gpu = findings(None)["gpu"]
    assert gpu.is_well
    assert "pip install --force-reinstall --no-deps torch==2.13.0 --index-url https://" in gpu.said
    monkeypatch.setattr(torch.version, "cuda", None)
    assert findings(None)["gpu"].said == "none"


def test_a_cpu_build_on_a_machine_with_a_gpu_is_amiss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    gpu = findings(None)["gpu"]
    assert not gpu.is_well
    assert "a CPU build: pip install" in gpu.said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "is its driver new enough?" in findings(None)["gpu"].said


def test_a_port_in_use_and_a_model_that_is_not_there_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = findings(tmp_path / "none", port)
    assert not found[f"port {port}"].is_well
    assert "in use" in found[f"port {port}"].said
    assert not found["model"].is_well
    assert "no such directory" in found["model"].said
