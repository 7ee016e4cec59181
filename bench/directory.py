"""The cost of the block directory beside Dynamo's: look-ups, events, memory, tokens to decision.

    python -m bench.directory --peers-python PYTHON [--sizes N …] [--groups N …]

PYTHON is an interpreter that has ``ai-dynamo-runtime``. Each subject runs in a process of its own
(`bench/directory_costs.py`), in turn. Chains have 8,000 blocks. One is held by every group, each
other one by 1 to 4, up to an end of its own each. Half of the prompts are held by some group to
their end, half up to their middle. Events come as their wire format (protobuf, JSON), of
512 blocks (a chunk of 8,192 tokens) or of one. Prints tables, for bench/results/directory.md.
What the file ``--state`` holds already is not measured again: a run that was stopped goes on
where it was, and one can be cut into pieces (``--subjects``, ``--sizes``, ``--groups``).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from bench.provenance import commit, cpu

HERE = Path(__file__).parent
SUBJECTS = ("quire", "quire-python", "dynamo")

Cell = tuple[int, int]
"""Blocks, groups."""

Results = dict[str, dict[str, float]]
"""By subject."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers-python", type=Path, help="without it: no Dynamo")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=[])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--largest-groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--state", type=Path, help="a JSON file of what was measured so far")
    arguments = parser.parse_args()
    cells = [
        (size, groups)
        for size in arguments.sizes
        for groups in (arguments.largest_groups if size > 1_000_000 else arguments.groups)
    ]
    state: Path | None = arguments.state
    results = _load(state) if state and state.exists() else {}
    for size, groups in cells:
        found = results.setdefault((size, groups), {})
        for name in arguments.subjects or SUBJECTS:
            is_peer = name == "dynamo"
            if name in found or (is_peer and arguments.peers_python is None):
                continue
            python = arguments.peers_python if is_peer else Path(sys.executable)
            found[name] = _measure(name, size, groups, python)
            if state:
                rows = [[*cell, results[cell]] for cell in sorted(results)]
                state.write_text(json.dumps(rows) + "\n")
    results = {cell: _in_order(results[cell]) for cell in sorted(results)}
    print("\n\n".join([f"# The block directory\n\n{_host()}", *_tables(results)]))


def _load(path: Path) -> dict[Cell, Results]:
    return {(size, groups): found for size, groups, found in json.loads(path.read_text())}


def _in_order(found: Results) -> Results:
    return {name: found[name] for name in SUBJECTS if name in found}


def _measure(name: str, num_blocks: int, num_groups: int, python: Path) -> dict[str, float]:
    print(f"{name}: {num_blocks} blocks, {num_groups} groups", file=sys.stderr)
    command = [str(python.absolute()), "-m", "bench.directory_costs", name]
    done = subprocess.run(
        [*command, str(num_blocks), str(num_groups)],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        env=os.environ | {"DYN_LOG": "error"},  # Else it writes a line for each decision.
        check=True,
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _tables(results: dict[Cell, Results]) -> list[str]:
    lookups = [
        "## Look-up, µs: p50 / p99",
        "`as array` is `BlockDirectory.prefix_lengths`; all others return a dict of groups. "
        "`held by all` is the chain of 8,000 blocks that every group holds.\n",
        "| blocks | groups | | 100 | 1,000 | 8,000 | held by all |",
        "|---|---|---|---|---|---|---|",
    ]
    rates = [
        "## Events and memory",
        "Million blocks a second in events of 512 blocks (of one), from their wire format.\n",
        "| blocks | groups | | stored | removed | mixed | bytes per block |",
        "|---|---|---|---|---|---|---|",
    ]
    decisions = [
        "## From tokens to overlaps, µs: p50 / p99",
        "Blocks of 16 tokens; the prompt is not in the directory.\n",
        "| blocks | groups | | 16,384 tokens | of which hashing | 131,072 | of which hashing |",
        "|---|---|---|---|---|---|---|",
    ]
    for (num_blocks, num_groups), subjects in results.items():
        for name, found in subjects.items():
            start = f"| {num_blocks:,} | {num_groups} | {name} "
            names = ["100", "1000", "8000", "popular"]
            lookups.append(start + _times(found, [f"look_up_{n}" for n in names]))
            if "lengths_100_p50_us" in found:
                as_array = [f"lengths_{n}" for n in names]
                lookups.append(f"{start}as array {_times(found, as_array)}")
            kinds = ("stored", "removed", "mixed")
            cells = " | ".join(_rate(found, kind) for kind in kinds)
            rates.append(f"{start}| {cells} | {found['bytes_per_block']:.1f} |")
            if "decide_16384_p50_us" in found:
                steps = [f"{what}_{n}" for n in (16384, 131072) for what in ("decide", "hash_only")]
                decisions.append(start + _times(found, steps))
    return ["\n".join(lines) for lines in (lookups, rates, decisions)]


def _times(found: dict[str, float], names: list[str]) -> str:
    cells = [
        f"{found[f'{name}_p50_us']:,.1f} / {found[f'{name}_p99_us']:,.1f}"
        if f"{name}_p50_us" in found
        else "–"
        for name in names
    ]
    return f"| {' | '.join(cells)} |"


def _rate(found: dict[str, float], kind: str) -> str:
    rate = found.get(f"{kind}_per_s")
    alone = found.get(f"{kind}_per_s_one_by_one")
    if rate is None:
        return "–"
    return f"{rate / 1e6:.1f}" + (f" ({alone / 1e6:.2f})" if alone else "")


def _host() -> str:
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} × {cpu()}, load {load:.1f} at the end; "
        f"Python {platform.python_version()}; commit {commit()}."
    )


if __name__ == "__main__":
    main()
