"""Writes the generated pages of the documentation: ``python -m tools.reference [--check]``.

`PAGES` are the pages. Each is Markdown with a part between two marks, which this replaces; the rest
is written by hand.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.reference import calls, configuration, from_vllm, services

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- generated -->\n", "<!-- end -->\n"
PAGES: Mapping[str, object] = {
    "docs/configuration.md": configuration.page,
    "docs/api.md": calls.page,
    "docs/grpc.md": services.page,
    "docs/from-vllm.md": from_vllm.page,
}


def written(path: str) -> str:
    """The up-to-date contents of a page."""
    make = PAGES[path]
    assert callable(make)
    before, _, rest = (ROOT / path).read_text().partition(BEGIN)
    return f"{before}{BEGIN}{make()}{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is stale")
    check = parser.parse_args().check
    stale = [path for path in PAGES if (ROOT / path).read_text() != written(path)]
    for path in stale:
        if check:
            sys.exit(f"{', '.join(stale)}: stale; run python -m tools.reference")
        (ROOT / path).write_text(written(path))


if __name__ == "__main__":
    main()
