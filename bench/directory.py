"""What the block directory costs beside its peers: look-ups, events, memory, tokens to decision.

    python bench/directory.py --peers-python PYTHON [--sizes N …] [--groups N …]

PYTHON is an interpreter that has ``ai-dynamo-runtime``, ``pyzmq`` and ``msgpack``; Ray's prefix
tree is taken from Ray itself. Each subject runs in a process of its own
(`bench/directory_subjects.py`), in turn. Chains have 8,000 blocks. One is held by every group, each
other one by 1 to 4, up to an end of its own each. Half of the prompts are held by some group to
their end, half up to their middle. Events come as their wire format (protobuf, JSON, msgpack), of
512 blocks (a chunk of 8,192 tokens) or of one. Prints tables, and writes them to bench/results/,
together with the cells of earlier runs under the same name.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
RAY_AT_MOST = 100_000
"""Ray's tree stores text and takes minutes for more."""

Cell = tuple[int, int]
"""Blocks, groups."""

Results = dict[str, dict[str, float]]
"""By subject."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--peers-python", type=Path, help="without it: no Dynamo")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--largest-groups", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--name", default=f"{datetime.now(UTC):%Y-%m-%d}-directory")
    arguments = parser.parse_args()
    cells = [
        (size, groups)
        for size in arguments.sizes
        for groups in (arguments.largest_groups if size > 1_000_000 else arguments.groups)
    ]
    target = HERE / "results" / f"{arguments.name}.json"
    results = _load(target) if target.exists() else {}
    for cell in cells:
        results[cell] = _run_cell(*cell, arguments.peers_python)
        target.write_text(json.dumps([[*cell, found] for cell, found in results.items()]) + "\n")
    results = dict(sorted(results.items()))
    text = "\n\n".join([f"# The block directory\n\n{_host()}", *_tables(results)]) + "\n"
    print(text)
    target.with_suffix(".md").write_text(text)


def _load(path: Path) -> dict[Cell, Results]:
    return {(size, groups): found for size, groups, found in json.loads(path.read_text())}


def _run_cell(num_blocks: int, num_groups: int, peers_python: Path | None) -> Results:
    here = Path(sys.executable)
    subjects = [("quire", here), ("quire-python", here)]
    if peers_python is not None:
        subjects += [("dynamo", peers_python), ("selection", peers_python)]
    if num_blocks <= RAY_AT_MOST:
        subjects.append(("ray", here))
    results: Results = {}
    for name, python in subjects:
        print(f"{name}: {num_blocks} blocks, {num_groups} groups", file=sys.stderr)
        command = [str(python), str(HERE / "directory_subjects.py"), name]
        done = subprocess.run(
            [*command, str(num_blocks), str(num_groups)], stdout=subprocess.PIPE, check=True
        )
        results[name] = json.loads(done.stdout)
    return results


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
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} × {cpu}, load {load:.1f} at the end; "
        f"Python {platform.python_version()}; commit {commit}."
    )


if __name__ == "__main__":
    main()
