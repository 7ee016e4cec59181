"""Quire against another checkout of itself: the workloads of `bench.peers`, in turn.

    python -m bench.peers.against CHECKOUT [--models S,M] [--workloads decode,cached,cold]

Prints each workload's figure here and there, what of the floor is reached here, and the ratio of
the two: above 1, this checkout is faster. No peers are installed, and nothing is written.
"""

import sys
from contextlib import closing
from pathlib import Path

from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.peers.floor import floor_seconds, measure_limits
from bench.peers.measure import Contest, Measured, Settings
from bench.peers.peers import HERE, OURS, Engine
from bench.peers.workloads import WORKLOADS
from bench.report import command, names

ROOTS = ("cluster", "worker", "kernels", "proto", "router")
CACHE = Path.home() / ".cache" / "quire" / "peers"


def main() -> int:
    parser = command("bench.peers.against", __doc__)
    parser.add_argument("checkout", type=Path, help="of Quire, to compare with")
    parser.add_argument("--models", type=names(SHAPES), default=["S"])
    rows = ["decode", "cached", "cold"]
    parser.add_argument("--workloads", type=names(WORKLOADS), default=rows)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    there = options.checkout.resolve()
    if not (there / "worker").is_dir():
        parser.error(f"{there} is no checkout of Quire: it has no folder worker")
    settings = Settings(
        repeats=options.repeats,
        patience_s=20.0,
        timeout_s=300.0,
        num_threads=options.threads,
        logs=CACHE / "logs",
    )
    settings.logs.mkdir(parents=True, exist_ok=True)
    engines = [_engine(OURS, HERE.parents[1]), _engine("there", there)]
    limits = measure_limits(num_threads=options.threads)
    measured = Measured(repeats=options.repeats)
    workloads = [WORKLOADS[name] for name in options.workloads]
    for shape in (SHAPES[name] for name in options.models):
        for dtype in {workload.dtype: None for workload in workloads}:
            contest = Contest(
                engines,
                shape,
                make_checkpoint(shape, CACHE / "checkpoints"),
                dtype=dtype,
                settings=settings,
                measured=measured,
            )
            with closing(contest):
                contest.run([workload for workload in workloads if workload.dtype == dtype])
        for workload in workloads:
            here, other = (measured.median(shape, workload, e.name) for e in engines)
            if here is None or other is None:
                continue
            gain = here / other if workload.unit == "tokens/s" else other / here
            line = f"{shape.name} {workload.title:36} {here:9.1f} there {other:9.1f} "
            line += f"{workload.unit:8} gain {gain:.2f}"
            floor_s = floor_seconds(workload, shape, limits)
            if floor_s is not None and workload.unit == "tokens/s":
                line += f"   of the floor {here / workload.figure(floor_s, shape):.0%}"
            print(line, flush=True)
    print("\n".join(failure.describe() for failure in measured.failures), file=sys.stderr)
    return 1 if measured.failures else 0


def _engine(name: str, checkout: Path) -> Engine:
    host = HERE / "host.py"
    adapter = HERE / "adapters" / f"{OURS}.py"
    return Engine(
        name=name,
        command=(sys.executable, "-P", str(host), str(adapter)),
        environment={"PYTHONPATH": ":".join(str(checkout / root) for root in ROOTS)},
    )


if __name__ == "__main__":
    sys.exit(main())
