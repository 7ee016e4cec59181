"""A readable line of everything except the weights that determines the bits of a group's outputs.

Two groups whose lines are equal compute the same bits, so a stream may move between them. The line
is conservative: groups with different lines may still compute the same bits. It contains:

- Native CPU library: its build (sources, compiler and instruction set). The number of threads does
  not matter, nor that of ranks if it divides the parts of a sum.
- Plain PyTorch on a CPU: the CPU's vendor and instruction sets, by which its libraries choose
  kernels; threads and ranks, by which they split sums.
- GPU: its model, CUDA, Triton, the settings of matrix products, and ranks.

And always: torch, llguidance, Quire's own code before and after the logits, and the data types.
"""

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import quire.kernels
from quire import native_build
from quire.kernels.native import library as native
from quire.worker.model.config import resolve_dtype
from quire.worker.model.spec import Experts, ModelSpec
from quire.worker.request.config import EngineConfig
from quire.worker.weights.loader import Shard

_OWN_CODE = (
    *("model/**/*.py", "weights/**/*.py", "rank/sampling/*.py", "rank/runner.py", "rank/model.py"),
    *("rank/collectives.py", "rank/symmetric.py", "rank/copies.py", "parts/constraints/edits.py"),
    *("step/sampling_batch.py", "parts/adapters/*.py", "text/grammar/compiler.py"),
)
"""Modules of the worker that compute, sample, or define the layout of blocks that are exchanged."""
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16")


def numerics(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    device: torch.device,
    num_ranks: int,
    is_native: bool,
) -> str:
    """The line for one rank of ``num_ranks``. ``is_native``: the native library computes everything
    up to the logits."""
    parts = [
        *_device(device, is_native=is_native, is_deterministic=config.deterministic),
        f"torch {torch.__version__}",
        f"llguidance {_grammars()}",
        *_modules(spec),
        f"code {_code_digest()}",
        f"dtype {resolve_dtype(config, spec)}",
        f"quantization {config.quantization or 'none'}",
        f"kv {config.kv_cache_dtype}",
        _sums(spec, num_ranks, is_native=is_native),
    ]
    return ", ".join(parts)


def _device(device: torch.device, *, is_native: bool, is_deterministic: bool) -> list[str]:
    if device.type == "cuda":
        import triton

        major, minor = torch.cuda.get_device_capability(device)
        return [
            f"cuda {torch.cuda.get_device_name(device)} {major}.{minor}",
            f"CUDA {torch.version.cuda}",
            f"triton {triton.__version__}",
            f"float32 {torch.get_float32_matmul_precision()}",
            "products " + ("that ignore the batch" if is_deterministic else "by cuBLAS's choice"),
        ]
    # Sampling uses torch in any case.
    capability = f"torch's {torch.backends.cpu.get_cpu_capability()}"
    if is_native:
        return [f"cpu {native.build_name()}", capability]
    flags = native_build.cpu_flags()
    has = "+".join(flag for flag in _CPU_FLAGS if flag in flags)
    threads = f"{torch.get_num_threads()} threads"
    return [f"cpu plain {native_build.cpu_vendor()} {has}".rstrip(), capability, threads]


def _grammars() -> str:
    """The version of the library for constrained decoding, which a machine that only computes may
    lack."""
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return "none"


def _modules(spec: ModelSpec) -> list[str]:
    """The libraries whose modules and kernels compute a model that runs through transformers."""
    if spec.through_transformers is None:
        return []
    build = native.build_name() if native.library() is not None else "none"
    return [f"transformers {version('transformers')}", f"native {build}"]


def _sums(spec: ModelSpec, num_ranks: int, *, is_native: bool) -> str:
    """How sums over heads and MLP channels are split: into parts, which are added as a tree."""
    if not is_native:
        return f"{num_ranks} ranks"
    shard = Shard(size=num_ranks)
    totals = []
    for layer in dict.fromkeys(spec.layers):
        mlp = layer.mlp.mlp if isinstance(layer.mlp, Experts) else layer.mlp
        totals += [layer.attention.num_heads, mlp.size // 2]
    parts = [shard.num_parts(total) * num_ranks for total in totals]
    return "sums of " + " and ".join(map(str, parts))


@functools.cache
def _code_digest() -> str:
    worker = Path(__file__).parents[1]
    own = [file for pattern in _OWN_CODE for file in sorted(worker.glob(pattern))]
    kernels = sorted(Path(quire.kernels.__path__[0]).rglob("*.py"))
    state = hashlib.sha256()
    for file in (*own, *kernels):
        state.update(file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()[:16]
