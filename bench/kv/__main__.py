"""Tests KV transfers on real engines: they change no answer and delay no other request.

python -m bench.kv equal [--requests N]      answers are the same wherever their KV comes from
python -m bench.kv faults [--requests N]     answers are the same if transfers fail
python -m bench.kv disturb [--rounds N]      slowdown of a group's decodes while it sends KV
python -m bench.kv drain [--streams N]       the gap of streams that move to another group
python -m bench.kv prefill [--requests N]    streams of prefill groups are whole if groups change
"""

import os
from pathlib import Path

from bench.kv.disturb import disturb
from bench.kv.drain import drain
from bench.kv.equal import DTYPES, equal
from bench.kv.faults import faults
from bench.kv.prefill import prefill
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.provenance import commit, cpu
from bench.report import command

from quire import demo_model

CACHE = Path.home() / ".cache/quire/bench"


def main() -> int:
    parser = command("bench.kv", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("equal").add_argument
    add("--requests", type=int, default=600)
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    add = commands.add_parser("faults").add_argument
    add("--requests", type=int, default=1000)
    add("--shape", choices=SHAPES, help="of random weights; the demo model unless told")
    add("--cache", type=Path, default=CACHE, help="for checkpoints")
    add = commands.add_parser("drain").add_argument
    add("--streams", type=int, default=50)
    add("--tokens", type=int, default=2048, help="of each prompt")
    add("--rounds", type=int, default=2)
    add = commands.add_parser("prefill").add_argument
    add("--requests", type=int, default=1000)
    add = commands.add_parser("disturb").add_argument
    add("--shape", choices=SHAPES, default="M")
    add("--streams", type=int, default=8)
    add("--rounds", type=int, default=12)
    add("--window-s", type=float, default=2.0)
    add("--from-host", action="store_true", help="lend what lies in host memory alone")
    add("--cache", type=Path, default=CACHE, help="for checkpoints")
    arguments = parser.parse_args()
    print(f"{cpu()}, commit {commit()}, load {os.getloadavg()[0]:.1f}\n", flush=True)
    match arguments.command:
        case "equal":
            return equal(num_requests=arguments.requests, dtypes=arguments.dtype)
        case "faults":
            model = demo_model.PATH
            if arguments.shape is not None:
                model = make_checkpoint(SHAPES[arguments.shape], arguments.cache)
            return faults(num_requests=arguments.requests, model=model)
        case "prefill":
            return prefill(num_requests=arguments.requests)
        case "disturb":
            return disturb(
                shape=arguments.shape,
                num_streams=arguments.streams,
                rounds=arguments.rounds,
                window_s=arguments.window_s,
                from_host=arguments.from_host,
                cache=arguments.cache,
            )
        case _:
            return drain(
                num_streams=arguments.streams,
                num_tokens=arguments.tokens,
                rounds=arguments.rounds,
            )


if __name__ == "__main__":
    raise SystemExit(main())
