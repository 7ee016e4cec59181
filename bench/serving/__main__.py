"""Routing on a real cluster: hit rate and time to first token, policy by policy, in turn.

    python -m bench.serving [--policies NAME ...] [--rounds N] [--loop closed|open] [--state FILE]
    python -m bench.serving --policies prefix_aware prefix_aware:lose_batches=0.1
    python -m bench.serving --policies prefix_aware:use_directory=0 --gateways 4

Starts a Ray cluster on this machine. Each run deploys the application again with empty caches:
gateways, and groups of one rank of one thread. The load comes from this process: multi-tenant
chats with shared system prompts.

Rounds are the outermost loop, and every other one goes from the last line to the first, so that no
line always follows the same one. A finished run is written to the state file and not repeated: the
same command continues where the last one stopped. ``--budget`` stops in time, with status 3 if
something is left. ``--report`` only prints what is there. The first fifth of the requests warms
caches up and is not counted.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from bench.peers.checkpoints import SHAPES
from bench.report import command
from bench.serving.case import LOOPS, cases, in_turn
from bench.serving.report import progress, tables
from bench.serving.runs import Runs

from quire.router.config import POLICY_NAMES
from quire.worker.request.errors import QuireError

SOME_LEFT = 3
_PER_RUN_S = 20.0
"""Approximate time of a run besides its load."""


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return _main(arguments)
    except QuireError as error:
        print(f"bench.serving: {error}", file=sys.stderr)
        return 2


def _main(arguments: argparse.Namespace) -> int:
    runs = Runs(arguments.state)
    status = 0
    if not arguments.report:
        status = _run(arguments, runs)
    text = "\n".join(tables(runs.records, reference=arguments.reference))
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")
    return status


def _run(arguments: argparse.Namespace, runs: Runs) -> int:
    from quire.cluster.deploy.local import ray_session

    # Ray starts its workers at niceness 15: groups and gateways would have what others leave.
    os.environ.setdefault("RAY_worker_niceness", "0")
    wanted = cases(
        arguments.policies,
        num_groups=arguments.groups,
        num_gateways=arguments.gateways,
        model=arguments.model,
        num_blocks=arguments.num_blocks,
        loop=arguments.loop,
        num_users=arguments.users,
        chats_per_s=arguments.rate,
        limit_s=arguments.limit_s,
        num_tenants=arguments.tenants,
        num_chats=arguments.chats,
        think_s=arguments.think_s,
        seed=arguments.seed,
    )
    rounds = range(arguments.first_round, arguments.first_round + arguments.rounds)
    left = [(r, case) for r, case in in_turn(rounds, wanted) if not runs.has(case, r)]
    begin_s = time.monotonic()
    longest_s = 0.0
    if not left:
        return 0
    with ray_session():
        for round_, case in left:
            run_begin_s = time.monotonic()
            if run_begin_s - begin_s + (longest_s or _PER_RUN_S) > arguments.budget:
                return SOME_LEFT
            record = runs.run(case, round_, folder=arguments.cache)
            longest_s = max(longest_s, time.monotonic() - run_begin_s)
            print(progress(case, round_, record), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command("bench.serving", __doc__)
    add = parser.add_argument_group("what to compare").add_argument
    add(
        "--policies",
        nargs="+",
        metavar="NAME",
        default=["prefix_aware", "round_robin", "power_of_two"],
        help=f"of {', '.join(POLICY_NAMES)};\n"
        "NAME:use_directory=0,lose_batches=0.1,lose_events=0.1,num_gateways=4\n"
        "differs from the flags below",
    )
    add("--rounds", type=int, default=3)
    add("--first-round", type=int, default=0, help="for rounds of one command to follow others'")
    add("--groups", type=int, default=2)
    add("--gateways", type=int, default=1)
    add("--num-blocks", type=int, default=1500, help="of 16 tokens, in each group's cache")
    add("--model", default="S", help=f"{', '.join(SHAPES)}: random weights; or a path")

    add = parser.add_argument_group("load").add_argument
    add("--loop", choices=LOOPS, default="closed")
    add("--users", type=int, default=16, help="of the closed loop")
    add("--rate", type=float, default=10.0, help="chats per second of the open loop")
    add("--tenants", type=int, default=40)
    add("--chats", type=int, default=120)
    add("--think-s", type=float, default=0.3, help="before each turn, on average")
    add("--limit-s", type=float, default=60.0)
    add("--seed", type=int, default=0)

    add = parser.add_argument_group("what is kept").add_argument
    add("--state", type=Path, default=Path("bench-serving.jsonl"))
    add("--output", type=Path, help="a Markdown file for the tables")
    add("--report", action="store_true", help="run nothing, print what the state file has")
    add("--reference", default="round_robin", help="the line that others are compared with")
    add("--budget", type=float, default=float("inf"), help="seconds")
    add("--cache", type=Path, default=Path.home() / ".cache/quire/serving", help="for checkpoints")
    return parser


if __name__ == "__main__":
    sys.exit(main())
