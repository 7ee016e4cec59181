"""The way of a request in timed runs: where the time to its first token went.

to gateway   from the client's call to the gateway's handler
prepare      checked, tokenized, hashed
admission    until it is routed: it waits at the gateway while groups have no room
to group     until the group's event loop has it
inbox        until the engine takes it: at the end of the step that is under way
queue        until its first step begins
steps        until the end of the step that gives its first token
back         from there through the group's event loop to the gateway
to client    until the client has the token
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
from bench.serving.case import case_of
from bench.serving.figures import WARM_UP, Row
from bench.serving.runs import Runs
from bench.serving.timed import Line, read_lines
from numpy.typing import NDArray

STAGES = (
    "to gateway",
    "prepare",
    "admission",
    "to group",
    "inbox",
    "queue",
    "steps",
    "back",
    "to client",
)
_POINTS = (
    "arrived_s",
    "prepared_s",
    "routed_s",
    "came_s",
    "added_s",
    "began_s",
    "first_s",
    "started_s",
)
PATH = ("to gateway", "prepare", "to group", "back", "to client")
"""What neither waits nor computes: the simulator leaves it out."""


def stages_of(rows: Sequence[Row], lines: Sequence[Line]) -> NDArray[np.float64]:
    """Seconds: a row for each request behind the warm-up that is known at every point, a column
    for each of `STAGES`."""
    known: dict[str, Line] = {}
    for line in lines:
        if line["kind"] != "step":
            known.setdefault(line["request"], {}).update(line)
    found = []
    for row in rows[int(WARM_UP * len(rows)) :]:
        points = known.get(row["id"], {})
        if row["error"] is None and all(name in points for name in _POINTS):
            came_s = row["sent_s"] + row["ttft_s"]
            found.append(np.diff([row["sent_s"], *(points[name] for name in _POINTS), came_s]))
    return np.array(found).reshape(-1, len(STAGES))


def mean_path_s(runs: Sequence[Sequence[Row]], lines: Sequence[Sequence[Line]]) -> float:
    """Of all requests of all runs, the mean time on the `PATH`."""
    every = np.concatenate([stages_of(rows, kept) for rows, kept in zip(runs, lines, strict=True)])
    return float(every[:, [STAGES.index(name) for name in PATH]].sum(axis=1).mean())


def ways(runs: Runs) -> Iterator[str]:
    """Markdown: each timed run's stages, mean and 90th percentile in ms."""
    timed = [record for record in runs.records if record.get("times")]
    if not timed:
        return
    yield "Where the time to the first token went, mean (90th percentile) in ms:\n"
    yield "| policy | requests | " + " | ".join(STAGES) + " | in all |"
    yield "| --- | ---: |" + " ---: |" * (len(STAGES) + 1)
    for record in timed:
        stages = 1000 * stages_of(record["rows"], read_lines(runs.trace_folder / record["times"]))
        if not len(stages):
            continue
        means, highs = stages.mean(axis=0), np.quantile(stages, 0.9, axis=0)
        cells = [f"{mean:.1f} ({high:.1f})" for mean, high in zip(means, highs, strict=True)]
        whole = fmean(stages.sum(axis=1).tolist())
        label = f"{case_of(record['case']).label}, {case_of(record['case']).num_groups} groups"
        yield f"| {label} | {len(stages)} | {' | '.join(cells)} | {whole:.1f} |"
    yield ""
