"""Fault injection on a real cluster: real load, real processes, real signals, checked streams.

    python -m bench.chaos [--fault NAME ...] [--streams 100] [--tp 2] [--output FILE]

Two replica groups of ``--tp`` ranks and two gateways, each on a host of its own (a network
namespace), serve the demo model in fp32. Faults are injected one after the other, each while all
streams run, half of them greedy and half sampled. The expected tokens of each stream come from the
offline engine, which ran each alone. It prints a matrix of guarantees and observations; the exit
status is 1 if a guarantee was broken. Needs root, iproute2, nftables and util-linux. See
docs/chaos.md.
"""

import argparse
import importlib
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.chaos.cluster import cluster_under_fire
from bench.chaos.stage import FAULTS, Stage, constrained, make_requests, offline, prefill_rate
from bench.chaos.verdicts import Row, matrix
from bench.namespaces import why_not
from bench.provenance import commit
from bench.report import command

from quire.cluster.deploy.signals import ended_by_signal

for _name in ("losses", "ends", "rollouts", "outages"):
    importlib.import_module(f"bench.chaos.{_name}")  # Its faults happen in this order.


def main() -> None:
    parser = command("bench.chaos", __doc__)
    add = parser.add_argument
    add("--fault", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME", help=_names())
    add("--streams", type=int, default=100)
    add("--tokens", type=int, default=100, help="of each stream")
    add("--tp", type=int, default=2, help="ranks of a group")
    add("--constrained", action="store_true", help="all streams are JSON of a schema or tool calls")
    add("--output", type=Path, help="a Markdown file for the matrix")
    add("--keep-logs", action="store_true", help="leave Ray's and Quire's logs, and say where")
    arguments = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"bench.chaos: {reason}")
    rows: list[Row] = []
    with ended_by_signal():  # What was begun is cleaned up, and what was seen is told.
        try:
            _run(arguments, rows)
        finally:
            lines = [*_head(arguments), *matrix(rows)]
            print("\n".join(["", *lines]), flush=True)
            if arguments.output is not None:
                arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(any(row.outcome.broken for row in rows))


def settings(*, tp: int, num_streams: int) -> dict[str, object]:
    """The cluster's settings. A group has room for all streams, so none waits for another."""
    return {
        "engine": {
            "tensor_parallel_size": tp,
            "dtype": "float32",
            "device": "cpu",
            "num_blocks": 2048,
            "num_threads": 1,
            "max_num_seqs": num_streams + 8,
            "max_num_batched_tokens": 512,
        },
        "num_groups": 2,
        "num_gateways": 2,
        "group_resource": "quire_group",
        "gateway_resource": "quire_gateway",
        "group_host": "auto",
        "host": "0.0.0.0",
        "drain_timeout_s": 20,
        "silence_timeout_s": 2,
        "step_deadline_s": 3,
        "max_group_deaths": 3,
    }


def _run(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Adds a row for each fault."""
    requests = make_requests(arguments.streams, num_tokens=arguments.tokens)
    if arguments.constrained:
        requests = constrained(requests)
    reference = offline(requests)
    config = settings(tp=arguments.tp, num_streams=arguments.streams)
    with cluster_under_fire(config, keep_logs=arguments.keep_logs) as cluster:
        cluster.wait_ready()
        rate = prefill_rate(cluster, requests)
        _say(f"the cluster is ready and computes {rate:.0f} prompt tokens a second")
        stage = Stage(cluster=cluster, requests=requests, reference=reference, prefill_rate=rate)
        for name in arguments.fault:
            outcome = FAULTS[name].run(stage)
            rows.append(Row(FAULTS[name].what, FAULTS[name].promise, outcome))
            _say(f"{name}: {'; '.join(outcome.seen)} | broken: {outcome.broken or 'nothing'}")


def _head(arguments: argparse.Namespace) -> list[str]:
    return [
        f"# Faults on a real cluster, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"`python -m bench.chaos --streams {arguments.streams} --tokens {arguments.tokens} "
        f"--tp {arguments.tp}{' --constrained' * arguments.constrained}`; commit {commit()}, "
        f"{os.cpu_count()} cores.",
        "",
    ]


def _names() -> str:
    return "\n".join(f"{name}: {fault.what}" for name, fault in FAULTS.items())


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
