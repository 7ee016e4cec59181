"""The behaviour of a cluster at three times the load that it can serve.

    python -m bench.overload                          a cluster of its own with the demo model
    python -m bench.overload --address HOST:PORT      one that runs

Open loop: requests are sent at random times, independent of earlier ones. A first phase saturates
the cluster; the requests completed per second are its *capacity*. Then requests arrive at
that rate, and at ``--factor`` times it. Each request is accepted, and its tokens are counted, or
refused with RESOURCE_EXHAUSTED. Any other outcome counts as *lost*, and no request may be lost.

All phases belong to one run. Compare the last line: the ratio of the p99s. Each phase prints the
requests served per second: if the last phase served clearly more than the capacity, the machine was
busy with something else when the capacity was measured, and the ratio is meaningless. Each phase
also prints the client's own lag: if it is not small, the client was the bottleneck. Where gateway
and groups share a machine, the model must be large enough for the groups to be the limit
(``--model M``), because a gateway's work is per token and per request.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc.aio
from bench.open_loop import REST_S, Bench, Phase, Workload, percentile
from bench.peers.checkpoints import SHAPES, make_checkpoint

from quire.cluster.client import Server
from quire.v1.inference_pb2_grpc import InferenceStub


async def measure(server: Server, workload: Workload) -> list[Phase]:
    """The phases at capacity and at ``factor`` times it."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        bench = Bench(InferenceStub(channel), server, workload)
        per_s = await bench.capacity_per_s()
        print(f"capacity: {per_s:.1f} requests/s with {workload.concurrency} under way", flush=True)
        await asyncio.sleep(REST_S)
        return [
            await bench.open_loop(f"{factor:g} x capacity", factor * per_s)
            for factor in (1.0, workload.factor)
        ]


def main() -> None:
    arguments = _parser().parse_args()
    workload = Workload(
        num_words=arguments.prompt_words,
        mean_tokens=arguments.mean_tokens,
        same_length=arguments.same_length,
        duration_s=arguments.duration_s,
        concurrency=arguments.concurrency,
        factor=arguments.factor,
        seed=arguments.seed,
    )
    with _address(arguments) as address:
        phases = asyncio.run(measure(Server(address=address), workload))
    for phase in phases:
        _print(phase.summary())
    ratio = percentile(phases[1].ttft_s, 99) / percentile(phases[0].ttft_s, 99)
    print(f"p99 TTFT of what was accepted: {ratio:.2f} times that at capacity")
    if arguments.output:
        result = {
            "workload": asdict(workload),
            "phases": [{**each.summary(), "due_and_ttft_s": each.completed} for each in phases],
            "p99_ratio": ratio,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def _print(summary: dict[str, Any]) -> None:
    print(
        f"{summary['name']:>14}: {summary['offered_per_s']:.1f}/s, {summary['served_per_s']:.1f}/s "
        f"served; {summary['sent']} sent, "
        f"{summary['completed']} completed, {summary['refused']} refused, {summary['lost']} lost; "
        f"TTFT p50 {summary['ttft_p50_s']:.3f} s, p99 {summary['ttft_p99_s']:.3f} s; refused "
        f"after p50 {summary['refusal_p50_s']:.3f} s, p99 {summary['refusal_p99_s']:.3f} s; "
        f"the client lags by p99 {summary['client_lag_p99_s']:.3f} s"
    )
    for error in summary["errors"]:
        print(f"{'':>14}  {error}")


@contextlib.contextmanager
def _address(arguments: argparse.Namespace) -> Iterator[str]:
    """Where to send requests: a cluster that runs, or one for as long as the block."""
    if arguments.address:
        yield arguments.address
        return
    from quire import demo_model
    from quire.cluster.config import ClusterConfig
    from quire.cluster.deploy.app import running_cluster
    from quire.worker.api.config import EngineConfig

    model = demo_model.PATH
    if arguments.model != "demo":
        model = make_checkpoint(SHAPES[arguments.model], arguments.cache)
    engine = EngineConfig(model=model, max_num_seqs=arguments.max_num_seqs)
    config = ClusterConfig(
        engine=engine,
        served_model_name=arguments.model,
        num_groups=arguments.num_groups,
        num_gateways=arguments.num_gateways,
        grpc_port=0,
        http_port=0,
        max_queue_wait_s=arguments.max_queue_wait_s,
    )
    with running_cluster(config) as endpoints:
        yield endpoints.grpc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--address", help="host:port of a gateway; without it, a cluster is started")
    add("--model", choices=["demo", *SHAPES], default="demo", help="random weights, but for demo")
    add("--cache", type=Path, default=Path.home() / ".cache/quire/bench", help="for checkpoints")
    add("--num-groups", type=int, default=2, help="of the cluster that is started")
    add("--num-gateways", type=int, default=1)
    add("--max-queue-wait-s", type=float, default=1.0, help="of admission, there")
    add("--max-num-seqs", type=int, default=16)
    add("--prompt-words", type=int, default=60)
    add("--mean-tokens", type=int, default=64, help="of outputs: from 1 to twice as many each")
    add("--same-length", action="store_true", help="all outputs have the mean length")
    add("--duration-s", type=float, default=60.0, help="of a phase: p99s of short ones are chance")
    add(
        "--concurrency",
        type=int,
        default=36,
        help="when capacity is measured: just above all groups' slots, or refusals are measured",
    )
    add("--factor", type=float, default=3.0, help="of capacity, for the overload")
    add("--seed", type=int, default=1)
    add("--output", type=Path, help="a JSON file with all that was measured")
    return parser


if __name__ == "__main__":
    main()
