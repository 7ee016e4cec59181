"""``quire doctor``: checks this machine for the requirements of serving."""

import argparse
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from quire.cluster.cli.help import Parser, whole
from quire.worker.request.errors import QuireError

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "ray", "grpcio", "protobuf")
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_CUDA_TORCH = "pip install --force-reinstall --no-deps torch --index-url https://pypi.org/simple"
_LEAST_SHM_GIB, _LEAST_DISK_GIB = 1.0, 5.0


class Finding(NamedTuple):
    subject: str
    is_well: bool
    said: str


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Checks whether this machine has what serving needs. The exit status is 1 if "
        "something is missing or wrong."
    )
    parser.add_argument("model", nargs="?", type=Path, help="a model whose files are checked too")
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address on which gateways will listen"
    )
    port = whole(least=0, most=65535)
    parser.add_argument(
        "--http-port", type=port, default=8000, help="the HTTP port, which must be free"
    )
    parser.add_argument("--grpc-port", type=port, default=50051, help="the gRPC port")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    findings = []
    for finding in look(
        arguments.model, host=arguments.host, ports=(arguments.http_port, arguments.grpc_port)
    ):
        findings.append(finding)
        print(f"{'ok  ' if finding.is_well else 'BAD '} {finding.subject:12} {finding.said}")
    return 0 if all(finding.is_well for finding in findings) else 1


def look(model: Path | None, *, host: str, ports: tuple[int, ...]) -> Iterator[Finding]:
    """The findings, one after the other; some take seconds."""
    yield _python()
    for package in _PACKAGES:
        yield _package(package)
    checks: list[tuple[str, Callable[[], tuple[bool, str]]]] = [
        ("cpu", _cpu),
        ("compiler", _compiler),
        ("gpu", _gpu),
        ("memory", _memory),
        ("/dev/shm", _shared_memory),
        ("disk", _disk),
        *((f"port {port}", lambda port=port: _port(host, port)) for port in ports),
    ]
    if model is not None:
        checks.append(("model", lambda: _model(model)))
    for subject, check in checks:
        try:
            yield Finding(subject, *check())
        except (OSError, QuireError, ImportError) as error:
            yield Finding(subject, False, str(error))


def _python() -> Finding:
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 14)
    said = f"{platform.python_version()} on {platform.platform()}"
    return Finding("python", is_known, said if is_known else f"{said}: 3.11 to 3.14 are tested")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed: pip install 'quire-serve[cluster]'")


def _cpu() -> tuple[bool, str]:
    cores = len(os.sched_getaffinity(0))
    from quire.kernels.native import library as native

    return True, f"{cores} cores for this process; kernels for {native.available_isas()[0]}"


def _compiler() -> tuple[bool, str]:
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        return False, "none: CPU kernels run in PyTorch, several times slower; install g++"
    from quire.kernels.native import library as native

    if native.library() is None:
        return False, f"{found}, but the native library could not be made; the log says why"
    return True, f"{found}; the native library is there"


def _gpu() -> tuple[bool, str]:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return True, "none" + _smaller_torch(torch.version.cuda, torch.__version__)
        if torch.version.cuda is None:
            return False, f"none that torch {torch.__version__} can use, a CPU build: {_CUDA_TORCH}"
        return False, "torch sees none: does nvidia-smi show one, and is its driver new enough?"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return True, f"{', '.join(names)}; CUDA {torch.version.cuda}, NCCL {nccl}"


def _smaller_torch(cuda: str | None, version: str) -> str:
    """Advice about a CUDA build on a machine without a GPU: it works, but is large."""
    if cuda is None:
        return ""
    number = version.partition("+")[0]
    return (
        f"; torch {version} is the CUDA build, 5 GB that a CPU does not need: pip install "
        f"--force-reinstall --no-deps torch=={number} --index-url {_CPU_INDEX}, and pip "
        "uninstall the packages nvidia-*"
    )


def _memory() -> tuple[bool, str]:
    from quire.worker.rank.kv import available_ram_bytes

    free = available_ram_bytes() / 2**30
    return free > 2, f"{free:.1f} GiB free"


def _shared_memory() -> tuple[bool, str]:
    free = shutil.disk_usage("/dev/shm").free / 2**30
    said = f"{free:.1f} GiB free"
    if free < _LEAST_SHM_GIB:
        return False, f"{said}: Ray wants {_LEAST_SHM_GIB:g}; in a container use --shm-size"
    return True, said


def _disk() -> tuple[bool, str]:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    place = next(each for each in (home, *home.parents) if each.exists())
    free = shutil.disk_usage(place).free / 2**30
    return free > _LEAST_DISK_GIB, f"{free:.1f} GiB free at {home}, where models of the hub go"


def _port(host: str, port: int) -> tuple[bool, str]:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            return False, f"{host}:{port}: {error.strerror}"
    return True, f"{host}:{port} is free"


def _model(model: Path) -> tuple[bool, str]:
    from quire.worker.model.config import read_model_spec
    from quire.worker.model.hub import fetch_text_files, is_hub_name
    from quire.worker.text.tokenizer import Tokenizer
    from quire.worker.weights.checkpoint import open_checkpoint

    folder = fetch_text_files(model)
    spec = read_model_spec(folder)
    Tokenizer.load(folder)
    how = "through transformers" if spec.through_transformers else "by its description"
    layers = f"{len(spec.layers)} layers, " if spec.layers else ""  # Transformers has its own.
    said = f"{layers}{spec.vocab_size} tokens, {how}"
    if not is_hub_name(model):
        files = open_checkpoint(folder).files
        said += f"; {sum(file.stat().st_size for file in files) / 2**30:.1f} GiB of weights"
    return True, said
