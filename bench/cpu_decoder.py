"""A forward pass of the native CPU library against the floor that the machine sets.

    python bench/cpu_decoder.py [--models SML] [--threads N] [--cpu-time]

Random bfloat16 weights, vocabulary 32,000. The floor adds up two parts: the products at the
machine's rate, or the weights read once where that takes longer; and attention, computed or its
KV read. It needs the machine to itself; beside other work, ``--cpu-time`` with one thread counts
only the time that this process had.
"""

import argparse
import statistics
import time

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
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    for name in arguments.models:
        decoder = _decoder(name)
        for rows in (
            [(64, 1)],
            [(48, 1)] * DECODES[name],
            [(848, 1)] * DECODES[name],
            [(512, 512)],
        ):
            batch, kv = _step(name, rows)
            times = []
            for _ in range(arguments.rounds + 1):
                start = clock()
                decoder.forward(batch, kv, all_reduce=lambda x: x)
                times.append(clock() - start)
            seconds = statistics.median(times[1:])
            floor = _floor_s(name, rows, num_threads=arguments.threads)
            what = f"{len(rows)} rows of {rows[0][1]} new tokens at {rows[0][0]}"
            print(
                f"{name} {what:32} {seconds * 1e3:8.2f} ms   floor {floor * 1e3:8.2f} ms   "
                f"{floor / seconds:4.0%}",
                flush=True,
            )


def _decoder(name: str) -> Decoder:
    hidden, num_layers, heads, kv_heads, head, mlp = MODELS[name]
    backend = NativeBackend(native.load(native.available_isas()[0]))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).mul_(0.03).bfloat16()

    norm = torch.ones(hidden).bfloat16()
    layers = tuple(
        DecoderLayer(
            attention_norm_C=norm,
            qkv=backend.pack_linear(random((heads + 2 * kv_heads) * head, hidden)),
            o=backend.pack_linear(random(hidden, heads * head), num_parts=4 - 3 * (heads % 4 > 0)),
            mlp_norm_C=norm,
            gate_up=backend.pack_gated_linear(random(2 * mlp, hidden)),
            down=backend.pack_linear(random(hidden, mlp), num_parts=4),
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


def _step(name: str, rows: list[tuple[int, int]]) -> tuple[Batch, KvCache]:
    """Rows of (tokens, new tokens), their blocks shuffled; no two rows share any."""
    _, num_layers, _, kv_heads, head, _ = MODELS[name]
    per_row = -(-rows[0][0] // BLOCK)
    tables = torch.randperm(len(rows) * per_row).view(len(rows), per_row)
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


def _floor_s(name: str, rows: list[tuple[int, int]], *, num_threads: int) -> float:
    hidden, num_layers, heads, kv_heads, head, mlp = MODELS[name]
    per_token = num_layers * hidden * (2 * (heads + kv_heads) * head + 3 * mlp)
    lm_head = VOCABULARY * hidden
    gemm_flops = 2 * (sum(new for _, new in rows) * per_token + len(rows) * lm_head)
    weight_bytes = 2 * (per_token + lm_head)
    scores = sum(new * tokens - new * (new - 1) // 2 for tokens, new in rows)
    attention_flops = 4 * heads * head * num_layers * scores
    kv_bytes = 4 * sum(tokens for tokens, _ in rows) * num_layers * kv_heads * head
    gemm_s = max(gemm_flops / GEMM_FLOPS, weight_bytes / BYTES)
    attention_s = max(attention_flops / ATTENTION_FLOPS, kv_bytes / BYTES)
    return (gemm_s + attention_s) / num_threads


if __name__ == "__main__":
    main()
