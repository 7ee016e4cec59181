"""Stores the results of a run on a GPU: one JSON line per figure, written before the next begins.

A run may end at any moment: the machine is borrowed, a kernel may fault, a time limit may expire.
So nothing is kept in memory: parts append to one file, and the table is made from that file, even
that of an interrupted run.

Kinds of lines, by ``kind``: ``fact`` (what, value), ``timing`` (a row of the table), ``begin``
(case: what the part is about to run), ``fault`` (what, fault), ``part`` (seconds, outcome).
"""

import json
import os
from pathlib import Path
from typing import Any

from bench.report import markdown

Line = dict[str, Any]

LINES_NAME = "gpu.jsonl"
TABLE_NAME = "gpu.md"


class Lines:
    """Appends to the file of a run on behalf of one part."""

    def __init__(self, folder: Path, part: str, *, only: str = "") -> None:
        """``only`` is the one case that is to be run; empty is all."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.part_name = part
        self._only = only

    def fact(self, what: str, value: object) -> None:
        self._append({"kind": "fact", "what": what, "value": value})

    def timing(
        self,
        shape: str,
        case: str,
        implementation: str,
        *,
        seconds: float,
        rate: str,
        floor_s: float | None,
    ) -> None:
        """A row of the table. ``rate`` has its unit; ``floor_s`` is by the measured limits."""
        share = None if floor_s is None else floor_s / seconds
        row = {"shape": shape, "case": case, "implementation": implementation}
        self._append({"kind": "timing", **row, "ms": seconds * 1e3, "rate": rate, "share": share})

    def begin(self, case: str) -> bool:
        """Says what comes next, so that a fault can be told from its neighbours.

        Returns whether the case is to be run.
        """
        if self._only and case != self._only:
            return False
        self._append({"kind": "begin", "case": case})
        return True

    def not_run(self, what: str, why: Exception) -> None:
        """What cannot be done here, and is no fault."""
        self.fact(f"not run: {what}", f"{type(why).__name__}: {why}"[:200])

    def fault(self, what: str, fault: str) -> None:
        self._append({"kind": "fault", "what": what, "fault": fault})

    def part(self, *, seconds: float, outcome: str) -> None:
        self._append({"kind": "part", "seconds": round(seconds, 1), "outcome": outcome})

    def read(self) -> list[Line]:
        """The lines of all parts so far."""
        return read_lines(self._folder)

    def _append(self, line: Line) -> None:
        line = {"part": self.part_name, **line}
        print(json.dumps(line), flush=True)
        with (self._folder / LINES_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_lines(folder: Path) -> list[Line]:
    """The lines of a run; a last one that was cut off in its middle is left out."""
    path = folder / LINES_NAME
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def fact(lines: list[Line], what: str) -> Any:
    """The last value of a fact, or ``None``."""
    found = [line["value"] for line in lines if line["kind"] == "fact" and line["what"] == what]
    return found[-1] if found else None


def write_table(folder: Path) -> Path:
    """Writes the Markdown page of the run in ``folder`` from its lines; returns its path."""
    lines = read_lines(folder)
    about = fact(lines, "about") or {}
    page = [
        f"# Quire on {about.get('device', 'an unknown device')}, {about.get('date', '')}",
        "",
        f"`python -m bench.gpu.run` at commit {about.get('commit')}, torch {about.get('torch')}, "
        f"triton {about.get('triton')}. bfloat16, blocks of 16 tokens unless a row says otherwise. "
        "Medians of graph replays, the level-2 cache replaced by a read before each. The share is "
        "the floor divided by the time: decode counts the KV bytes that it must read against a "
        "copy, prefill the flops of visible tokens against a matrix product, a model's step the "
        "bytes of its weights and KV.",
        "",
        markdown(
            ["part", "seconds", "outcome"],
            [
                [line["part"], str(line["seconds"]), line["outcome"]]
                for line in lines
                if line["kind"] == "part"
            ],
            num_left=1,
        ),
    ]
    faults = [line for line in lines if line["kind"] == "fault"]
    page += ["", f"Faults: {len(faults)}.", ""]
    page += [
        f"- {line['part']}: {line['what']}: {(line['fault'].splitlines() or [''])[0]}"
        for line in faults
    ]
    facts = [
        [line["part"], line["what"], _shown(line["value"])]
        for line in lines
        if line["kind"] == "fact" and line["what"] != "about"
    ]
    page += ["", markdown(["part", "fact", "value"], facts, num_left=3)]
    names = ("shape", "case", "implementation")
    timings = [
        [
            *(line[name] for name in names),
            *(f"{line['ms']:.4f}", line["rate"]),
            "" if line["share"] is None else f"{line['share']:.1%}",
        ]
        for line in lines
        if line["kind"] == "timing"
    ]
    page += ["", markdown([*names, "ms", "rate", "of limit"], timings, num_left=3)]
    path = folder / TABLE_NAME
    path.write_text("\n".join(page) + "\n")
    return path


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("|", "/").replace("\n", " ")
