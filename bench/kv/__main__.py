"""Proofs that KV may travel, on real engines: it changes no answer and holds nobody up.

python -m bench.kv equal [--requests N]      answers are the same wherever their KV comes from
python -m bench.kv faults [--requests N]     and whatever happens to it on the way
python -m bench.kv disturb [--rounds N]      what a lender's decodes lose while it lends
python -m bench.kv drain [--streams N]       the gap of streams that move to another group
"""

from bench.kv.equal import equal
from bench.kv.faults import faults
from bench.report import command


def main() -> int:
    parser = command("bench.kv", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("equal").add_argument
    add("--requests", type=int, default=240)
    add = commands.add_parser("faults").add_argument
    add("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.command == "equal":
        return equal(num_requests=arguments.requests)
    return faults(num_requests=arguments.requests)


if __name__ == "__main__":
    raise SystemExit(main())
