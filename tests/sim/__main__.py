"""Runs the simulation for a range of seeds: ``python -m tests.sim --seeds 0-100 --seconds 3600``.

For a seed that fails, prints the end of its trace and the command that repeats it, and goes on with
the next. The exit status is then 1.
"""

import argparse
import logging
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from tests.sim.swarm import draw_plan
from tests.sim.world import run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0-9", help="one, or from-to")
    parser.add_argument("--seconds", type=float, default=600.0, help="of simulated time, each")
    parser.add_argument("--verbose", action="store_true", help="show the plans")
    arguments = parser.parse_args(argv)
    logging.disable(logging.ERROR)  # Lost groups are the rule here.
    first, _, last = arguments.seeds.partition("-")
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    simulated_s, num_failed, begin_s = 0.0, 0, time.perf_counter()
    for seed in range(int(first), int(last or first) + 1):
        plan = draw_plan(seed, length_s=arguments.seconds)
        if arguments.verbose:
            print(plan)
        try:
            result = run(plan, seed=seed)
        except Exception:
            num_failed += 1
            traceback.print_exc()
            print(f"seed {seed} failed; again: {command(seed, arguments.seconds)}", flush=True)
            continue
        outcomes += result.outcomes
        faults += result.faults
        simulated_s += result.simulated_s
        print(f"seed {seed}: {result.digest} {dict(result.outcomes)}", flush=True)
    real_s = time.perf_counter() - begin_s
    print(f"requests: {dict(outcomes.most_common())}")
    print(f"faults: {dict(faults.most_common())}")
    print(f"{simulated_s:.0f} s in {real_s:.1f} s, {simulated_s / real_s:.0f} times real time")
    return min(num_failed, 1)


def command(seed: int, length_s: float) -> str:
    """The command that repeats a run."""
    return f"python -m tests.sim --seeds {seed} --seconds {length_s:g}"


if __name__ == "__main__":
    raise SystemExit(main())
