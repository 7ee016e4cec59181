"""Measures Quire and its peers on one machine, and prints one table.

    python -m bench.peers [--quick] [--peers vllm,transformers] [--models S,M] [--workloads ...]

Installs each peer in a virtual environment of its own and makes checkpoints of random weights, both
under the cache folder. First checks that all engines answer the same tokens in fp32, then measures
(`bench.peers.measure`), and writes the table and all figures to bench/results.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench.peers.checkpoints import SHAPES, Shape, make_checkpoint
from bench.peers.floor import BYTES, Limits, floor_seconds, measure_limits
from bench.peers.measure import Contest, Measured, Settings, TokensDiffer, check_tokens
from bench.peers.peers import OURS, PEERS, Engine, install
from bench.peers.process import EngineFailed
from bench.peers.report import describe, table, write_results
from bench.peers.workloads import WORKLOADS, Workload

QUICK = ("S", "cold,decode,stream,ttft,ttft-cached")


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
    )
    settings.logs.mkdir(parents=True, exist_ok=True)
    engines = [install(name, cache) for name in (OURS, *options.peers)]
    checkpoints = {shape.name: make_checkpoint(shape, cache / "checkpoints") for shape in shapes}

    try:
        agreed = check_tokens(engines, shapes[0], checkpoints[shapes[0].name], settings)
    except (TokensDiffer, EngineFailed) as error:
        print(f"bench.peers: {error}\nnothing was timed", file=sys.stderr)
        return 1
    print(f"the same tokens in fp32: {', '.join(agreed)}", file=sys.stderr, flush=True)

    limits = measure_limits(num_threads=settings.num_threads)
    about = describe(num_threads=settings.num_threads, limits=limits)
    measured = Measured(repeats=settings.repeats)
    status = 0
    try:
        for shape in shapes:
            checkpoint = checkpoints[shape.name]
            _measure(engines, shape, checkpoint, workloads, limits, settings, measured)
    except KeyboardInterrupt:
        status = 130
        print("broken off; what was measured so far:", file=sys.stderr)
    text = table(measured, about, shapes, workloads, [engine.name for engine in engines])
    print(text)
    print(write_results(text, measured, about, settings, name=options.name))
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
    for dtype in BYTES:
        group = sorted(
            (workload for workload in workloads if workload.dtype == dtype),
            key=lambda workload: floor_seconds(workload, shape, limits) or 0.0,
        )
        if not group:
            continue
        contest = Contest(
            engines, shape, checkpoint, dtype=dtype, settings=settings, measured=measured
        )
        with closing(contest):
            contest.run(group)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listed: dict[str, tuple[list[str], str]] = {
        "peers": (list(PEERS), "engines beside ours"),
        "models": (list(SHAPES), "shapes of model"),
        "workloads": (list(WORKLOADS), "rows of the table"),
    }
    for name, (known, what) in listed.items():
        parser.add_argument(f"--{name}", help=f"{what}: of {','.join(known)}; default: all")
    parser.add_argument("--quick", action="store_true", help="the small model, a few workloads")
    parser.add_argument("--repeats", type=int, help="default: 3, with --quick 1")
    parser.add_argument(
        "--patience", type=float, default=20.0, help="seconds; what takes longer is not repeated"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds; an engine that takes longer is out"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--name", default="peers", help="of the files in bench/results")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path.home() / ".cache" / "quire" / "peers",
        help="for environments, checkpoints and logs; default: %(default)s",
    )
    options = parser.parse_args()
    if options.quick:
        options.models, options.workloads = (
            options.models or QUICK[0],
            options.workloads or QUICK[1],
        )
    options.repeats = options.repeats or (1 if options.quick else 3)
    for name, (known, _) in listed.items():
        given = getattr(options, name)
        chosen = known if given is None else [item for item in given.split(",") if item]
        unknown = [item for item in chosen if item not in known]
        if unknown or (not chosen and name != "peers"):
            parser.error(f"--{name} {given!r}: not of {', '.join(known)}")
        setattr(options, name, chosen)
    return options


if __name__ == "__main__":
    sys.exit(main())
