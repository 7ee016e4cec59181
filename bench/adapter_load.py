"""Compares requests for many adapters to requests for the base model, on a real cluster.

    python -m bench.adapter_load [--shape S] [--adapters 64] [--slots 8] [--rates 10 20]

Two replica groups serve random weights with ``--slots`` slots each. Requests arrive at random times
at each of the ``--rates`` per second; rounds alternate between requests for the model only and for
adapters only. Adapters are chosen with Zipf's frequencies, and have been requested before. It
prints medians over the rounds: time to first token, tokens per second, and their ratios.
"""

import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoint
from bench.report import command, markdown, percentile
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream
from safetensors.torch import save_file

from quire.cluster.config import ClusterConfig, LoraModule
from quire.cluster.deploy.app import running_cluster
from quire.worker.request.config import EngineConfig

MODEL = "base"
MAX_TOKENS = 40
Figures = tuple[float, float, float]
"""p50 and p99 of the time to first token in ms, and tokens per second."""


def main() -> None:
    parser = command("bench.adapter_load", __doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="S")
    add("--adapters", type=int, default=64)
    add("--rank", type=int, default=16)
    add("--slots", type=int, default=8, help="of each of the two groups")
    add("--rates", type=float, nargs="+", default=[10.0, 20.0], help="requests a second")
    add("--requests", type=int, default=300, help="in each round")
    add("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(SHAPES[arguments.shape], Path(folder))
        adapters = [
            LoraModule(
                name=f"adapter-{number}",
                path=str(
                    write_adapter(Path(folder) / str(number), model, number, rank=arguments.rank)
                ),
            )
            for number in range(arguments.adapters)
        ]
        config = ClusterConfig(
            engine=EngineConfig(
                model=model,
                device="cpu",
                num_threads=1,
                enable_lora=True,
                max_loras=arguments.slots,
                max_cpu_loras=arguments.adapters,
            ),
            served_model_name=MODEL,
            num_groups=2,
            lora_modules=tuple(adapters),
            grpc_port=0,
            http_port=0,
        )
        names = [each.name for each in adapters]
        with running_cluster(config) as endpoints:
            rows = []
            asyncio.run(_run(endpoints.grpc, _requests(names, arguments.rates[0], len(names) * 3)))
            for rate in arguments.rates:
                alone, adapted = list[Figures](), list[Figures]()
                for number in range(arguments.rounds):
                    for known, found in (([MODEL], alone), (names, adapted)):
                        requests = _requests(known, rate, arguments.requests, seed=number)
                        found.append(asyncio.run(_run(endpoints.grpc, requests)))
                rows.append(_row(rate, alone, adapted))
    head = ["requests/s", "model: p50, p99 ms", "tokens/s", "adapters", "tokens/s", "p99", "speed"]
    print(markdown(head, rows))


def _row(rate: float, alone: Sequence[Figures], adapted: Sequence[Figures]) -> list[str]:
    base, other = (
        [median(each) for each in zip(*found, strict=True)] for found in (alone, adapted)
    )
    return [
        f"{rate:g}",
        f"{base[0]:.0f}, {base[1]:.0f}",
        f"{base[2]:.0f}",
        f"{other[0]:.0f}, {other[1]:.0f}",
        f"{other[2]:.0f}",
        f"{other[1] / base[1]:.2f}",
        f"{other[2] / base[2]:.2f}",
    ]


def _requests(names: Sequence[str], rate: float, count: int, *, seed: int = -1) -> list[Request]:
    draw = random.Random(seed)
    weights = [1 / (place + 1) for place in range(len(names))]
    at_s, requests = 0.0, []
    for number in range(count):
        at_s += draw.expovariate(rate)
        token_ids = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(16, 96))]
        (name,) = draw.choices(names, weights)
        requests.append(
            Request(
                name=str(number),
                token_ids=token_ids,
                max_tokens=MAX_TOKENS,
                at_s=at_s,
                seed=number,
                model=name,
            )
        )
    return requests


async def _run(address: str, requests: Sequence[Request]) -> Figures:
    begin_s = time.monotonic()
    streams = [Stream(request=each) for each in requests]
    async with Gateways([address]) as gateways:

        async def send(stream: Stream) -> None:
            await asyncio.sleep(max(0.0, begin_s + stream.request.at_s - time.monotonic()))
            await gateways.send(stream)

        await asyncio.gather(*map(send, streams))
    took_s = time.monotonic() - begin_s
    if broken := [each.error for each in streams if not each.is_complete]:
        raise RuntimeError(f"{len(broken)} streams failed: {broken[0]}")
    firsts_ms = [1000 * each.ttft_s for each in streams if each.ttft_s is not None]
    num_tokens = sum(len(each.tokens) for each in streams)
    return percentile(firsts_ms, 50), percentile(firsts_ms, 99), num_tokens / took_s


def write_adapter(folder: Path, model: Path, seed: int, *, rank: int) -> Path:
    """Writes a random adapter of all linear layers of a Llama, in PEFT's format."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    q_size, kv_size = heads * head, config["num_key_value_heads"] * head
    inner = config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(100 + seed)
    tensors = {}
    for layer, (module, (num_in, num_out)) in itertools.product(
        range(config["num_hidden_layers"]), shapes.items()
    ):
        name = f"base_model.model.model.layers.{layer}.{module}"
        for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            tensors[f"{name}.lora_{part}.weight"] = 0.15 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.rpartition(".")[2] for name in shapes],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


if __name__ == "__main__":
    main()
