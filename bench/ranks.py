"""One rank with all threads against several ranks that share them: what tensor parallelism costs.

    python -m bench.ranks [--models M L] [--ranks 2] [--repeats 3] [--gloo] [--across-nodes]

Both compute the same tokens from the same checkpoint of random weights on the same cores: one rank
with as many threads as there are ranks, and ranks of one thread each. They run in turn; medians.
The ratio is one rank's time divided by that of several: what of the machine is left. The smallest
model, S, has 9 and 3 heads, which two ranks cannot share.

With --across-nodes (root, iproute2, nftables) two more groups run: ranks over sockets on one node,
and on two, network namespaces that a veth joins. What a message to them and back takes is printed
first. The two "nodes" share the machine's cores: what is seen is the price of the network's
software, not of wires.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from bench.message_cost import time_messages
from bench.namespaces import Host, Network
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoint
from bench.rank_launcher import ECHO_RANK, Wrap, make_executor

from quire import llm
from quire.llm import LLM, SamplingParams
from quire.worker.api.config import EngineConfig
from quire.worker.ranks.process_executor import ProcessExecutor
from quire.worker.step.messages import Executor

CACHE = Path.home() / ".cache" / "quire" / "checkpoints"
WORKLOADS = {"decode batch": (16, 32, 32), "all at once": (256, 16, 16)}
"""Prompt tokens, output tokens, requests."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["M"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gloo", action="store_true", help="no native library: gloo, PyTorch")
    parser.add_argument("--across-nodes", action="store_true")
    parser.add_argument("--inside", nargs=2, metavar=("NAMESPACE", "ADDRESS"), action="append")
    args = parser.parse_args()
    if args.across_nodes and not args.inside:
        with Network(["a", "b"]) as network:
            hosts = [flag for host in network.hosts.values() for flag in _flags(host)]
            argv = [sys.executable, "-m", "bench.ranks", *sys.argv[1:], *hosts]
            sys.exit(network.hosts["a"].run(argv, check=False).returncode)
    nodes = [Host(name, name=name, address=address) for name, address in args.inside or ()]
    if args.gloo:
        os.environ["QUIRE_NATIVE"] = "0"
    for name in args.models:
        compare(name, ranks=args.ranks, repeats=args.repeats, nodes=nodes)


def _flags(host: Host) -> list[str]:
    return ["--inside", host.namespace, host.address]


def compare(name: str, *, ranks: int, repeats: int, nodes: Sequence[Host]) -> None:
    """Prints a line for each workload."""
    path = make_checkpoint(SHAPES[name], CACHE)
    places = _places(nodes)
    if places:
        _print_messages(path, places, ranks=ranks)
    settings: dict[str, dict[str, Any]] = {
        "one rank": {"num_threads": ranks},
        "ranks": {"num_threads": 1, "tensor_parallel_size": ranks},
        "ranks, async": {
            "num_threads": 1,
            "tensor_parallel_size": ranks,
            "async_scheduling": True,
        },
    }
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> LLM:
            return stack.enter_context(
                LLM(path, dtype="bfloat16", enable_prefix_caching=False, num_blocks=1024, **options)
            )

        llms = {label: start(**options) for label, options in settings.items()}
        for label, place in places.items():
            with mock.patch.object(llm, "make_executor", partial(make_executor, nodes=place)):
                llms[label] = start(**settings["ranks"])
        for workload, shape in WORKLOADS.items():
            times: dict[str, list[float]] = {label: [] for label in llms}
            for label, seconds in runs(llms, shape, repeats):
                times[label].append(seconds)
            medians = {label: statistics.median(values) for label, values in times.items()}
            shown = "   ".join(
                f"{label} {seconds * 1e3:7.0f} ms ({medians['one rank'] / seconds:.2f})"
                for label, seconds in medians.items()
            )
            print(f"{name} {workload:12}  {shown}", flush=True)


def _places(nodes: Sequence[Host]) -> dict[str, list[tuple[str, Wrap]]]:
    """Where ranks over sockets are, by what that is called."""
    if not nodes:
        return {}
    here, *others = nodes
    first: tuple[str, Wrap] = (here.address, list)
    return {
        "sockets": [first, first],
        "two nodes": [first, *((other.address, other.command) for other in others)],
    }


def _print_messages(path: Path, places: dict[str, list[tuple[str, Wrap]]], *, ranks: int) -> None:
    """The way of 128 decodes to all ranks, and of their tokens back."""
    config = EngineConfig(model=path, tensor_parallel_size=ranks, num_threads=1)
    makers: dict[str, Callable[[EngineConfig], Executor]] = {"ranks": ProcessExecutor}
    for label, place in places.items():
        makers[label] = lambda config, place=place: (  # type: ignore[misc]
            make_executor(config, place, program=ECHO_RANK)[0]
        )
    for label, make in makers.items():
        times_ns = time_messages(
            config, num_rows=128, context=1000, num_steps=1000, make_executor=make
        )
        p50, p99 = np.percentile(times_ns[100:], [50, 99]) / 1e3
        print(f"message, {label:10}  median {p50:4.0f} us  p99 {p99:4.0f} us", flush=True)


def runs(
    llms: dict[str, LLM], shape: tuple[int, int, int], repeats: int
) -> Iterator[tuple[str, float]]:
    """Every engine in turn, once unmeasured; seconds of each run."""
    num_prompt, num_output, num_requests = shape
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, VOCAB_SIZE, (num_requests, num_prompt)).tolist()
    prompts = [{"prompt_token_ids": ids} for ids in tokens]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    for repeat in range(repeats + 1):
        for label, engine in llms.items():
            begin = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            if repeat:
                yield label, time.perf_counter() - begin


if __name__ == "__main__":
    main()
