"""Measures Quire and its peers on one machine, and prints one table.

    python -m bench.peers [--quick] [--peers vllm,transformers] [--models S,M] [--workloads ...]
    while python -m bench.peers --resume --budget 150; [ $? = 3 ]; do sleep 1; done  # in pieces
    python -m bench.peers --against CHECKOUT --models S --workloads decode,cached,cold

Installs each peer in a virtual environment of its own and makes checkpoints of random weights, both
under the cache folder. First checks on the small model that all engines answer the same tokens in
fp32, then measures (`bench.peers.measure`), and writes the table to bench/results/peers.md and
all figures beside it in JSON, which --resume reads.

With --against, the other engine is Quire as in another checkout of itself; nothing is written.
"""

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench.peers.checkpoints import SHAPES, SIZES, Shape, make_checkpoint
from bench.peers.floor import Limits, floor_seconds, measure_limits
from bench.peers.measure import (
    Contest,
    Measured,
    OutOfTime,
    Settings,
    TokensDiffer,
    check_tokens,
)
from bench.peers.peers import OURS, PEERS, Engine, another, install
from bench.peers.process import EngineFailed
from bench.peers.report import (
    RESULTS,
    describe,
    read_results,
    table,
    write_results,
)
from bench.peers.workloads import WORKLOADS, Workload
from bench.provenance import commit
from bench.report import command, names

SOME_LEFT = 3
"""The exit status of a run that had no time for all."""
QUICK_MODELS = ("S",)
QUICK_WORKLOADS = ("cold", "decode", "stream", "ttft", "ttft-cached")


def main() -> int:
    options = _options()
    cache: Path = options.cache
    shapes = [SHAPES[name] for name in options.models]
    workloads = [WORKLOADS[name] for name in options.workloads]
    settings = Settings(
        repeats=options.repeats,
        patience_s=options.patience,
        timeout_s=options.timeout,
        num_threads=options.threads,
        logs=cache / "logs",
        commit=commit(),
        deadline=time.monotonic() + options.budget,
    )
    settings.logs.mkdir(parents=True, exist_ok=True)
    if options.against:
        engines = [install(OURS, cache), another(options.against, cache)]
    else:
        engines = [install(name, cache) for name in (OURS, *options.peers)]
    checkpoints = {shape.name: make_checkpoint(shape, cache / "checkpoints") for shape in shapes}

    limits = measure_limits(num_threads=settings.num_threads)
    measured = Measured(repeats=settings.repeats)
    path = RESULTS / f"{options.name}.md"
    if options.resume and path.is_file():
        measured, earlier = read_results(path, repeats=settings.repeats)
        limits = limits.best(earlier)
        if options.renew:
            measured.forget_other_commits(OURS, settings.commit)
    about = describe(num_threads=settings.num_threads, limits=limits)

    status = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` loses no figures.
    try:
        if not options.against:
            small = SHAPES["S"]
            checkpoint = make_checkpoint(small, cache / "checkpoints")
            check_tokens(engines, small, checkpoint, settings, measured)
            print(f"the same tokens in fp32: {', '.join(measured.agreed)}", file=sys.stderr)
        for shape in shapes:
            _measure(engines, shape, checkpoints[shape.name], workloads, limits, settings, measured)
    except (TokensDiffer, EngineFailed) as error:
        print(f"bench.peers: {error}\nnothing was timed", file=sys.stderr)
        return 1
    except OutOfTime:
        status = SOME_LEFT
    except KeyboardInterrupt:
        status = 130
    if status:
        print("not all was measured; --resume measures the rest", file=sys.stderr)
    text = table(measured, about)
    print(text)
    if not options.against:
        print(path)
        write_results(path, text, measured, about, settings)
    return status


def _measure(
    engines: Sequence[Engine],
    shape: Shape,
    checkpoint: Path,
    workloads: Sequence[Workload],
    limits: Limits,
    settings: Settings,
    measured: Measured,
) -> None:
    """All workloads on one model: those of one dtype together, the shortest first."""
    for dtype in dict.fromkeys(workload.dtype for workload in workloads):
        if dtype not in engines[0].dtypes:
            print(f"{OURS} does not compute in {dtype}: left out", file=sys.stderr)
            continue
        group = sorted(
            (x for x in workloads if x.dtype == dtype and shape.name in x.models),
            key=lambda workload: floor_seconds(workload, shape, limits) or 0.0,
        )
        if not group:
            continue
        contest = Contest(
            [engine for engine in engines if dtype in engine.dtypes],
            shape,
            checkpoint,
            dtype=dtype,
            settings=settings,
            measured=measured,
        )
        with closing(contest):
            contest.run(group)


def _options() -> argparse.Namespace:
    parser = command("bench.peers", __doc__)
    add = parser.add_argument
    shown = f"engines beside ours, of {','.join(PEERS)}; default: all"
    add("--peers", type=names(PEERS, or_none=True), default=list(PEERS), help=shown)
    add("--against", type=Path, metavar="CHECKOUT", help="of Quire, instead of other engines")
    shown = f"of {','.join(SHAPES)}; default: {','.join(SIZES)}, with --quick {QUICK_MODELS[0]}"
    add("--models", type=names(SHAPES), help=shown)
    shown = f"of {','.join(WORKLOADS)}; default: all, with --quick {','.join(QUICK_WORKLOADS)}"
    add("--workloads", type=names(WORKLOADS), help=shown)
    add("--quick", action="store_true", help="the small model, a few workloads, once")
    add("--repeats", type=int, help="default: 3, with --quick 1")
    add("--patience", type=float, default=20.0, help="seconds; what takes longer is not repeated")
    add("--timeout", type=float, default=300.0, help="seconds; an engine that takes longer is out")
    shown = f"seconds after which nothing is begun; status {SOME_LEFT} says that some is left"
    add("--budget", type=float, default=math.inf, help=shown)
    shown = "keep the figures of the last run of this name, and measure what is missing"
    add("--resume", action="store_true", help=shown)
    shown = "with --resume: measure ours again where that was at another commit"
    add("--renew", action="store_true", help=shown)
    add("--threads", type=int, default=2, help="of each engine")
    shown = "of the files in bench/results; default: peers, with --quick peers-quick"
    add("--name", help=shown)
    cache = Path.home() / ".cache" / "quire" / "peers"
    add("--cache", type=Path, default=cache, help="for environments, checkpoints and logs")
    options = parser.parse_args()
    is_quick = options.quick
    options.models = options.models or list(QUICK_MODELS if is_quick else SIZES)
    options.workloads = options.workloads or list(QUICK_WORKLOADS if is_quick else WORKLOADS)
    options.name = options.name or ("peers-quick" if is_quick else "peers")
    options.repeats = options.repeats or (1 if is_quick else 3)
    return options


if __name__ == "__main__":
    sys.exit(main())
