"""``python -m tools.ptx [--only TEXT] [--sm N]``: every case on every GPU, as a table.

The exit status is 1 where a kernel differs from its twin.
"""

import argparse
import sys
import time

from tools.ptx.cases import CAPABILITIES, all_cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ptx")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--sm", type=int, nargs="*", default=CAPABILITIES)
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if arguments.only in case.name]
    print(f"{'case':<32} {'kernels':<44} {'sm':>3}  agrees  seconds")
    failed = False
    for case in cases:
        for capability in arguments.sm:
            begin = time.perf_counter()
            try:
                case.run(capability)
                agrees, why = "yes", ""
            except Exception as error:
                agrees, why, failed = "NO", f"{type(error).__name__}: {error}", True
            seconds = time.perf_counter() - begin
            kernels = ", ".join(kernel.removesuffix("_kernel") for kernel in case.kernels)
            print(f"{case.name:<32} {kernels:<44} {capability:>3}  {agrees:<6} {seconds:>8.1f}")
            if why:
                print(f"    {why.strip()}")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
