"""The cost of LoRA adapters in a decode step: the same batch with and without them, alternating.

    python -m bench.adapters [--shape S|M] [--batches 1 64] [--adapters 1 8 64] [--rank 16]

The model and the adapters have random weights. An adapter is for all linear layers ("all"), or for
those of attention ("attention": q, k, v and o). ``mixed`` has adapters for one row only.
"""

import statistics
import time
from pathlib import Path

import torch
from bench.peers.checkpoints import SHAPES, Shape, make_checkpoint
from bench.report import command, markdown

from quire.kernels.batch import Batch
from quire.kernels.ops import AdapterLayers, KvCache, LowRank, ProgramRunner
from quire.worker.model.config import read_model_spec
from quire.worker.model.load import load_model
from quire.worker.request.config import EngineConfig
from quire.worker.weights.loader import Shard

BLOCK = 16
CACHE = Path.home() / ".cache/quire/bench-checkpoints"


def main() -> None:
    parser = command("bench.adapters", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", choices=("int8", "w4"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape, dtype = SHAPES[arguments.shape], torch.bfloat16
    path = make_checkpoint(shape, CACHE)
    config = EngineConfig(model=path, quantization=arguments.quantization)
    runner = load_model(
        config,
        read_model_spec(path, model_impl="auto"),
        shard=Shard(rank=0, size=1),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=arguments.context + 1,
    ).runner
    assert runner.adapters is not None
    runner.adapters.open(num_slots=max(arguments.adapters), max_rank=arguments.rank)
    rows = []
    for what in ("all", "attention"):
        for slot in range(max(arguments.adapters)):
            layers = _adapter(shape, arguments.rank, what, seed=slot)
            runner.adapters.set(slot, layers)
        for batch in arguments.batches:
            kinds = {f"{n}": [row % n for row in range(batch)] for n in arguments.adapters}
            kinds = {name: slots for name, slots in kinds.items() if int(name) <= batch}
            kinds["mixed"] = [0] + [-1] * (batch - 1)
            without, times = _times(runner, shape, kinds, arguments)
            rows += [
                [what, str(batch), name, f"{without:.2f}", f"{ms:.2f}", f"{ms / without - 1:+.1%}"]
                for name, ms in times.items()
            ]
    print(markdown(["layers", "rows", "adapters", "without, ms", "with", "more"], rows))


def _adapter(shape: Shape, rank: int, what: str, *, seed: int) -> AdapterLayers:
    rng = torch.Generator().manual_seed(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size

    def part(num_in: int, first: int, num_out: int) -> LowRank:
        a, b = (
            torch.randn(size, generator=rng).mul(0.02).bfloat16()
            for size in ((rank, num_in), (num_out, rank))
        )
        return LowRank(a_RI=a, b_OR=b, first_row=first, scale=2.0)

    layers: dict[str, tuple[LowRank, ...]] = {}
    for layer in range(shape.num_layers):
        at = f"layers.{layer}"
        layers[f"{at}.qkv"] = (
            *(part(hidden, 0, q), part(hidden, q, kv)),
            part(hidden, q + kv, kv),
        )
        layers[f"{at}.o"] = (part(q, 0, hidden),)
        if what == "all":
            layers[f"{at}.gate_up"] = (part(hidden, 0, inner), part(hidden, inner, inner))
            layers[f"{at}.down"] = (part(inner, 0, hidden),)
    return layers


def _times(
    runner: ProgramRunner, shape: Shape, kinds: dict[str, list[int]], arguments: object
) -> tuple[float, dict[str, float]]:
    """Median step times in milliseconds."""
    context, rounds = arguments.context, arguments.rounds  # type: ignore[attr-defined]
    batch = len(kinds["mixed"])
    blocks = -(-(context + 1) // BLOCK)
    cache = (batch * blocks, BLOCK, shape.num_kv_heads, shape.head_size)
    kv: KvCache = [
        (torch.zeros(cache, dtype=torch.bfloat16), torch.zeros(cache, dtype=torch.bfloat16))
        for _ in range(shape.num_layers)
    ]
    first_B = torch.arange(batch) * blocks
    times: dict[str, list[float]] = {}
    for number in range(rounds + 3):
        for name, slots in {"without": None, **kinds}.items():
            step = Batch(
                token_ids_T=torch.randint(shape.vocab_size, (batch,)),
                positions_T=torch.full((batch,), context),
                slot_mapping_T=first_B * BLOCK + context,
                block_tables_BM=(first_B[:, None] + torch.arange(blocks)).int(),
                seq_lens_B=torch.full((batch,), context + 1, dtype=torch.int32),
                query_starts_B1=torch.arange(batch + 1, dtype=torch.int32),
                last_tokens_S=torch.arange(batch),
                num_decodes=batch,
                max_query_len=1,
                max_seq_len=context + 1,
                adapter_slots_T=None if slots is None else torch.tensor(slots, dtype=torch.int32),
            )
            begun = time.process_time()
            runner.forward(step, kv, all_reduce=lambda x: x, greatest_G2=torch.empty(batch, 2))
            if number >= 3:
                times.setdefault(name, []).append(1e3 * (time.process_time() - begun))
    medians = {name: statistics.median(each) for name, each in times.items()}
    return medians.pop("without"), medians


if __name__ == "__main__":
    main()
