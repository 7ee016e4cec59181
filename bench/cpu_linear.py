"""What the CPU's linear layers reach, against PyTorch's and against what the machine can do.

    python bench/cpu_linear.py [--threads N] [--model S|M|L] [--dtype bfloat16|float32]

Times all linear layers of one model, one after the other as a step runs them, for several numbers
of rows. The contenders take turns; a figure is the median of the rounds. Beside them stands the
rate at which this machine sums 512 MB, which no layer of one row can beat.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.kernels import native
from quire.kernels.native_int8 import Int8Linear
from quire.kernels.native_linear import Arena, PackedLinear

# (hidden, layers, (heads + 2 KV heads) * head size, MLP) and a vocabulary of 32,000
MODELS = {
    "S": (288, 6, 480, 768),
    "M": (768, 12, 1280, 2048),
    "L": (1280, 24, 1792, 3456),
}
VOCABULARY = 32_000
ROWS = (1, 4, 32, 128, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", choices=MODELS, default="M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    hidden, layers, qkv, mlp = MODELS[arguments.model]
    shapes = [(qkv, hidden), (hidden, hidden), (2 * mlp, hidden), (hidden, mlp)] * layers
    shapes.append((VOCABULARY, hidden))
    weights = [torch.randn(shape).mul_(0.05).to(dtype) for shape in shapes]
    library = native.load(native.available_isas()[0])
    arena = Arena(library)
    ours = [PackedLinear(library, arena, weight, None) for weight in weights]
    int8 = [Int8Linear(library, arena, weight, None) for weight in weights]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
    flops = 2 * sum(out * size for out, size in shapes)
    num_bytes = flops // 2 * dtype.itemsize

    read = _read_rate()
    print(f"{arguments.model} {arguments.dtype}, {arguments.threads} threads, {read:.1f} GB/s read")
    print(f"{'rows':>5} {'':12} {'ms':>8} {'GB/s':>7} {'GFLOP/s':>8}")
    for rows in ROWS:
        inputs = {size: torch.randn(rows, size).to(dtype) for size in {s[1] for s in shapes}}

        xs = [inputs[num_in] for _, num_in in shapes]
        contenders: dict[str, Callable[[], object]] = {
            "native": partial(_each, PackedLinear.__call__, ours, xs),
            "native int8": partial(_each, Int8Linear.__call__, int8, xs),
            "F.linear": partial(_each, lambda w, x: functional.linear(x, w), weights, xs),
            "mkldnn packed": partial(_each, _mkldnn_linear, packed, xs),
        }
        for name, seconds in _medians(contenders, rounds=arguments.rounds).items():
            read_bytes = num_bytes / (dtype.itemsize if name == "native int8" else 1)
            rate, speed = read_bytes / seconds / 1e9, rows * flops / seconds / 1e9
            print(f"{rows:5} {name:13} {seconds * 1e3:7.2f} {rate:7.1f} {speed:8.1f}", flush=True)


def _each(linear: Callable[..., object], weights: list[Any], xs: list[Tensor]) -> None:
    for weight, x in zip(weights, xs, strict=True):
        linear(weight, x)


def _mkldnn_linear(weight: Tensor, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out


def _medians(contenders: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        step()
    for _ in range(rounds):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _read_rate() -> float:
    data = torch.ones(512 << 18)
    seconds = _medians({"sum": data.sum}, rounds=5)["sum"]
    return data.nbytes / seconds / 1e9


if __name__ == "__main__":
    main()
