"""What the CPU's attention reaches, against PyTorch's and against what the machine can do.

    python bench/cpu_attention.py [--threads N] [--model S|M|L] [--dtype bfloat16|float32]
                                  [--block-size N]

One layer of each model: a decode of its batch at 848 tokens of context, with nothing shared and
with the first 768 tokens in the same blocks; a prompt of 816 tokens; and 8 rows of 48 new tokens
behind 768 cached ones. Contenders take turns; a figure is the median of the rounds.

    native   the C++ kernels      torch   `CpuBackend`
    SDPA     PyTorch's, on dense K and V that nobody had to gather: more than a paged engine has

GB/s counts each row's K and V once, whether it is shared or not, and GFLOP/s the two products.
The limits are measured in the same run: the read rate of memory by a sum over 512 MB, the
arithmetic rate by the best of PyTorch's matrix products of that dtype.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.kernels import native
from quire.kernels.backend import AttentionBackend
from quire.kernels.cpu import CpuBackend
from quire.kernels.native_backend import NativeBackend


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model's attention, and how many requests its benchmark runs at once."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of the same length."""

    name: str
    num_rows: int
    tokens: int
    queries: int
    shared: int = 0
    """Leading tokens that all rows have in the same blocks."""

    def kv_bytes(self, model: Model, dtype: torch.dtype) -> int:
        channels = model.num_kv_heads * model.head_size
        return 2 * self.num_rows * self.tokens * channels * dtype.itemsize

    def flops(self, model: Model) -> int:
        pairs = self.queries * (self.tokens - self.queries) + self.queries * (self.queries + 1) // 2
        return 4 * self.num_rows * pairs * model.num_heads * model.head_size


MODELS = {
    "S": Model(num_heads=9, num_kv_heads=3, head_size=32, num_rows=128),
    "M": Model(num_heads=12, num_kv_heads=4, head_size=64, num_rows=64),
    "L": Model(num_heads=20, num_kv_heads=4, head_size=64, num_rows=32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    isa = native.available_isas()[0]
    print(
        f"{arguments.dtype}, blocks of {arguments.block_size}, {arguments.threads} threads, {isa}: "
        f"memory {read_rate():.1f} GB/s, products {product_rate(dtype):.0f} GFLOP/s"
    )
    print(f"{'model':5} {'case':24} {'':7} {'ms':>8} {'GB/s':>7} {'GFLOP/s':>8}")
    backends = {"native": NativeBackend(native.load(isa)), "torch": CpuBackend()}
    for name in arguments.model or MODELS:
        model = MODELS[name]
        rows = model.num_rows
        for case in (
            Case(name="decode", num_rows=rows, tokens=848, queries=1),
            Case(name="decode, 768 shared", num_rows=rows, tokens=848, queries=1, shared=768),
            Case(name="prompt of 816", num_rows=1, tokens=816, queries=816),
            Case(name="8 x 48 after 768", num_rows=8, tokens=816, queries=48, shared=768),
        ):
            contenders = {
                label: attend_call(backend, case, model, dtype, arguments.block_size)
                for label, backend in backends.items()
            }
            contenders["SDPA"] = sdpa_call(case, model, dtype)
            for label, seconds in medians(contenders, rounds=arguments.rounds).items():
                rate = case.kv_bytes(model, dtype) / seconds / 1e9
                speed = case.flops(model) / seconds / 1e9
                print(
                    f"{name:5} {case.name:24} {label:7} {seconds * 1e3:8.3f} {rate:7.1f} "
                    f"{speed:8.1f}",
                    flush=True,
                )


def attend_call(
    backend: AttentionBackend, case: Case, model: Model, dtype: torch.dtype, block_size: int
) -> Callable[[], Tensor]:
    num_blocks, num_shared = -(-case.tokens // block_size), case.shared // block_size
    num_own = num_blocks - num_shared
    pool = torch.randperm(num_shared + case.num_rows * num_own).int()
    tables = torch.empty(case.num_rows, num_blocks, dtype=torch.int32)
    tables[:, :num_shared] = pool[:num_shared]
    tables[:, num_shared:] = pool[num_shared:].view(case.num_rows, num_own)
    k_cache, v_cache = (
        huge(torch.empty(len(pool), block_size, model.num_kv_heads, model.head_size, dtype=dtype))
        for _ in range(2)
    )
    k_cache.normal_()
    v_cache.normal_()
    q = torch.randn(case.num_rows * case.queries, model.num_heads, model.head_size).to(dtype)
    lengths = torch.full((case.num_rows,), case.tokens, dtype=torch.int32)
    starts = torch.arange(case.num_rows + 1, dtype=torch.int32) * case.queries
    return lambda: backend.attend(
        q,
        k_cache,
        v_cache,
        block_tables_BM=tables,
        seq_lens_B=lengths,
        query_starts_B1=starts,
        num_decodes=case.num_rows if case.queries == 1 else 0,
        max_query_len=case.queries,
        max_seq_len=case.tokens,
        scale=model.head_size**-0.5,
    )


def sdpa_call(case: Case, model: Model, dtype: torch.dtype) -> Callable[[], Tensor]:
    k, v = torch.randn(
        2, case.num_rows, model.num_kv_heads, case.tokens, model.head_size, dtype=dtype
    )
    q = torch.randn(case.num_rows, model.num_heads, case.queries, model.head_size, dtype=dtype)
    is_causal = case.queries == case.tokens
    visible = None
    if not is_causal and case.queries > 1:
        visible = torch.ones(case.queries, case.tokens, dtype=torch.bool)
        visible = visible.tril(case.tokens - case.queries)
    return lambda: scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=is_causal, enable_gqa=True
    )


def huge(tensor: Tensor) -> Tensor:
    """The same, in huge pages from its first use on, as the engine's pool is."""
    library = native.library()
    if library is not None:
        library.quire_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def medians(contenders: dict[str, Callable[[], Tensor]], *, rounds: int) -> dict[str, float]:
    """Seconds of a call. In each round every contender gets about 30 ms, and a call at least."""
    durations: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(rounds):
        for name, call in contenders.items():
            deadline = time.perf_counter() + 0.03
            while True:
                start = time.perf_counter()
                call()
                end = time.perf_counter()
                durations[name].append(end - start)
                if end > deadline:
                    break
    return {name: statistics.median(values) for name, values in durations.items()}


def read_rate() -> float:
    """GB/s."""
    data = huge(torch.empty(1 << 27)).fill_(1)
    return data.nbytes / 1e9 / min(_seconds(data.sum) for _ in range(7))


def product_rate(dtype: torch.dtype) -> float:
    """GFLOP/s."""
    rates = []
    for size in (512, 1024, 2048):
        product = partial(torch.matmul, *torch.randn(2, size, size).to(dtype))
        product()
        rates.append(2 * size**3 / 1e9 / min(_seconds(product) for _ in range(7)))
    return max(rates)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
