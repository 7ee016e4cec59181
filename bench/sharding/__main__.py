"""The directory of a large cluster in shards: 10,000 groups and 10^9 blocks, unless said otherwise.

    python -m bench.sharding fill --state FILE [--only SHARD …]
    python -m bench.sharding balance --state FILE [--data FOLDER]
    python -m bench.sharding preselect --state FILE [--data FOLDER]
    python -m bench.sharding report --state FILE [--output FILE.md]

``fill`` fills each shard in this process, one after the other, and measures it
(`bench.sharding.fill`). ``balance`` tells prompts and blocks of real traces to shards.
``preselect`` measures what it costs users if a decision looks at a few groups only. Each adds lines
to FILE, of which ``report`` makes tables.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.sharding import balance, fill, preselect, report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=("fill", "balance", "preselect", "report"))
    parser.add_argument("--state", type=Path, required=True, help="lines of JSON, added to")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has traces/")
    parser.add_argument("--output", type=Path, help="of the report; it is printed anyway")
    parser.add_argument("--blocks", type=int, default=10**9, help="of all shards together")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--only", type=int, nargs="+", help="shards to fill; all if absent")
    parser.add_argument(
        "--groups", type=int, nargs="+", help="numbers of them; of the part if absent"
    )
    arguments = parser.parse_args()
    part = arguments.part
    if part == "report":
        text = report.tables(_rows(arguments.state))
        print(text)
        if arguments.output:
            arguments.output.write_text(text)
        return
    for row in _measure(part, arguments):
        print(json.dumps(row), flush=True)
        with arguments.state.open("a") as file:
            file.write(json.dumps({"part": part, **row}) + "\n")


def _measure(part: str, arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    if part == "fill":
        (num_groups,) = arguments.groups or [10_000]
        only = range(arguments.shards) if arguments.only is None else arguments.only
        size = {"num_groups": num_groups, "num_shards": arguments.shards}
        for row in fill.measure(num_blocks=arguments.blocks, only=only, **size):
            yield size | row
    elif part == "balance":
        yield from balance.measure(arguments.data / "traces")
    else:
        yield from preselect.measure(
            arguments.data / "traces",
            group_counts=arguments.groups or [256, 1024],
        )


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
