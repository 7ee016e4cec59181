"""A forward pass of the native CPU library against the floor that the machine sets.

    python bench/cpu_decoder.py [--models SML] [--threads N] [--cpu-time] [--fixed-order] [--busy N]

Random bfloat16 weights, vocabulary 32,000, greedy rows. The floor adds up two parts: the products
at the machine's rate, or the weights read once where that takes longer; and attention, computed or
its KV read, shared blocks once. It needs the machine to itself; beside other work, ``--cpu-time``
with one thread counts only the time that this process had.

``--fixed-order`` takes turns with a decoder whose o and down projections sum all of their input in
one chain instead of four, as one rank alone could, and prints what the four cost: the only part of
the order of sums that is there for ranks to share it. ``--busy`` starts that many processes that
do nothing but take time.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.decoder import (
    Batch,
    Decoder,
    DecoderLayer,
    DecoderShape,
    DecoderWeights,
    KvCache,
)
from quire.kernels.native_backend import NativeBackend

# hidden, layers, heads, KV heads, head size, MLP
MODELS = {
    "S": (288, 6, 9, 3, 32, 768),
    "M": (768, 12, 12, 4, 64, 2048),
    "L": (1280, 24, 20, 4, 64, 3456),
}
DECODES = {"S": 128, "M": 64, "L": 32}
VOCABULARY, BLOCK = 32_000, 16
# Of one Zen 4 core: vdpbf16ps, the attention kernels, memory.
GEMM_FLOPS, ATTENTION_FLOPS, BYTES = 220e9, 175e9, 19e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="SML")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--fixed-order", action="store_true")
    parser.add_argument("--busy", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with _busy_processes(arguments.busy):
        _measure(arguments)


def _measure(arguments: argparse.Namespace) -> None:
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    for name in arguments.models:
        decoders = [
            _decoder(name, num_parts=n) for n in ((4, 1) if arguments.fixed_order else (4,))
        ]
        for rows, shared in (
            ([(64, 1)], 0),
            ([(48, 1)] * DECODES[name], 0),
            ([(848, 1)] * DECODES[name], 0),
            ([(848, 1)] * DECODES[name], 768),
            ([(512, 512)], 0),
            ([(816, 48)] * 40, 768),
        ):
            batch, kv = _step(name, rows, shared)
            greatest = torch.empty(len(rows), 2)
            times: list[list[float]] = [[] for _ in decoders]
            for _ in range(arguments.rounds + 1):
                for decoder, durations in zip(decoders, times, strict=True):
                    start = clock()
                    decoder.forward(batch, kv, all_reduce=lambda x: x, greatest_G2=greatest)
                    durations.append(clock() - start)
            seconds = statistics.median(times[0][1:])
            floor = _floor_s(name, rows, shared, num_threads=arguments.threads)
            what = f"{len(rows)} x {rows[0][1]} at {rows[0][0]}" + f", {shared} shared" * bool(
                shared
            )
            line = f"{name} {what:32} {seconds * 1e3:8.2f} ms   floor {floor * 1e3:8.2f} ms"
            line += f"   {floor / seconds:4.0%}"
            if arguments.fixed_order:
                ratios = [four / one for four, one in zip(times[0][1:], times[1][1:], strict=True)]
                line += f"   fixed order / free {statistics.median(ratios):.3f}"
            print(line, flush=True)


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    command = (sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _decoder(name: str, *, num_parts: int) -> Decoder:
    hidden, num_layers, heads, kv_heads, head, mlp = MODELS[name]
    backend = NativeBackend(native.load(native.available_isas()[0]))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).mul_(0.03).bfloat16()

    norm = torch.ones(hidden).bfloat16()
    layers = tuple(
        DecoderLayer(
            attention_norm_C=norm,
            qkv=backend.pack_linear(random((heads + 2 * kv_heads) * head, hidden)),
            o=backend.pack_linear(
                random(hidden, heads * head), num_parts=1 if heads % 4 else num_parts
            ),
            mlp_norm_C=norm,
            gate_up=backend.pack_gated_linear(random(2 * mlp, hidden)),
            down=backend.pack_linear(random(hidden, mlp), num_parts=num_parts),
        )
        for _ in range(num_layers)
    )
    embedding = random(VOCABULARY, hidden)
    weights = DecoderWeights(
        embedding_VC=embedding,
        layers=layers,
        norm_C=norm,
        lm_head=backend.pack_linear(embedding),
    )
    angles = torch.outer(torch.arange(1024.0), 10_000 ** -torch.linspace(0, 1, head // 2))
    shape = DecoderShape(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        eps=1e-5,
        cos_PR=angles.cos(),
        sin_PR=angles.sin(),
        is_shared=False,
    )
    decoder = backend.decoder(weights, shape)
    assert decoder is not None
    return decoder


def _step(name: str, rows: list[tuple[int, int]], shared: int) -> tuple[Batch, KvCache]:
    """Rows of (tokens, new tokens), their blocks shuffled; the first ``shared`` tokens are in the
    same blocks for all."""
    _, num_layers, _, kv_heads, head, _ = MODELS[name]
    per_row = -(-rows[0][0] // BLOCK)
    tables = torch.randperm(len(rows) * per_row).view(len(rows), per_row)
    tables[:, : shared // BLOCK] = tables[0, : shared // BLOCK]
    positions = [torch.arange(tokens - new, tokens) for tokens, new in rows]
    slots = [
        table[at // BLOCK] * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)
    ]
    starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0)
    batch = Batch(
        token_ids_T=torch.randint(0, VOCABULARY, (int(starts[-1]),)),
        positions_T=torch.cat(positions),
        slot_mapping_T=torch.cat(slots),
        block_tables_BM=tables.int(),
        seq_lens_B=torch.tensor([tokens for tokens, _ in rows], dtype=torch.int32),
        query_starts_B1=starts.int(),
        last_tokens_S=starts[1:] - 1,
        num_decodes=sum(new == 1 for _, new in rows),
        max_query_len=max(new for _, new in rows),
        max_seq_len=max(tokens for tokens, _ in rows),
    )
    shape = (len(rows) * per_row, BLOCK, kv_heads, head)
    kv = [
        (torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
        for _ in range(num_layers)
    ]
    return batch, kv


def _floor_s(name: str, rows: list[tuple[int, int]], shared: int, *, num_threads: int) -> float:
    hidden, num_layers, heads, kv_heads, head, mlp = MODELS[name]
    per_token = num_layers * hidden * (2 * (heads + kv_heads) * head + 3 * mlp)
    lm_head = VOCABULARY * hidden
    gemm_flops = 2 * (sum(new for _, new in rows) * per_token + len(rows) * lm_head)
    weight_bytes = 2 * (per_token + lm_head)
    scores = sum(new * tokens - new * (new - 1) // 2 for tokens, new in rows)
    attention_flops = 4 * heads * head * num_layers * scores
    read = shared + sum(tokens - shared for tokens, _ in rows)
    kv_bytes = 4 * read * num_layers * kv_heads * head
    gemm_s = max(gemm_flops / GEMM_FLOPS, weight_bytes / BYTES)
    attention_s = max(attention_flops / ATTENTION_FLOPS, kv_bytes / BYTES)
    return (gemm_s + attention_s) / num_threads


if __name__ == "__main__":
    main()
