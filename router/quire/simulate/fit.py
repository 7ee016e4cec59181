"""Fits a cost model to the results of ``python -m bench.step_times``."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.simulate.cost import CostModel
from quire.worker.request.errors import ConfigError


class _Decodes(NamedTuple):
    """A step of them, as it was measured."""

    num_context: float
    """Tokens that they attend to, shared ones once for each."""
    num_shared: int
    """Shared tokens among these, counted for every decode after the first."""
    ms: float


def fit_cost(paths: list[Path], *, num_cache_tokens: int) -> CostModel:
    """Least squares through the medians in the JSON files of one or more runs.

    A prefill is ``base + per_token * n``; with one size of chunk only, the base is the shortest
    decode step. A decode step is a line in the tokens that the batch holds, what several of its
    sequences share weighed as the runs with and without ``--shared-context`` say; without such
    runs ``shared_read`` is 1. Runs with several ``--chunk`` and ``--context`` say more. Of runs in
    both modes, the first is taken.

    Raises:
        ConfigError: A file is none of those, or no two batches were measured, or contexts were
            shared in all of them.
    """
    prefills: list[tuple[float, float]] = []
    decodes: list[_Decodes] = []
    for path in paths:
        try:
            report = json.loads(path.read_text())
            if report["benchmark"] != "step":
                raise ValueError(f"it is of {report['benchmark']!r}")
            rows = report["rows"]
            for row in (row for row in rows if row["is_async"] == rows[0]["is_async"]):
                median_ms = row["step"]["median_us"] / 1000
                if prefill := re.fullmatch(r"prefill (\d+)", row["kind"]):
                    prefills.append((float(prefill[1]), median_ms))
                elif decode := re.fullmatch(r"(\d+) decodes?", row["kind"]):
                    batch, shared = int(decode[1]), report.get("shared_context", 0)
                    held = batch * (report["context"] + report["num_steps"] / 2)
                    decodes.append(_Decodes(held, (batch - 1) * shared, median_ms))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: {error}; give the JSON of `bench.step_times`") from None
    if len({each.num_context for each in decodes}) < 2 or not prefills:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: need a prefill and decodes of two batches at least; "
            "run `python -m bench.step_times --batches 1 32 128`"
        )
    shared_read = _shared_read(decodes)
    decode_base, decode_linear = _line(
        [
            ((held - (1 - shared_read) * shared) / num_cache_tokens, ms)
            for held, shared, ms in decodes
        ]
    )
    if len({num_tokens for num_tokens, _ in prefills}) < 2:
        prefills.append((0.0, min(each.ms for each in decodes)))
    base, per_token = _line(prefills)
    return CostModel(
        base=max(base, 0.0),
        per_token=per_token,
        decode_base=max(decode_base, 0.0),
        decode_linear=max(decode_linear, 0.0),
        num_cache_tokens=num_cache_tokens,
        shared_read=shared_read,
    )


def _shared_read(decodes: list[_Decodes]) -> float:
    """The slope over further reads as a share of the one over first reads."""
    if not any(each.num_shared for each in decodes):
        return 1.0
    held, shared, ms = np.array(decodes).T
    terms = np.stack((np.ones(len(ms)), held - shared, shared), axis=1)
    if np.linalg.matrix_rank(terms) < 3:
        raise ConfigError(
            "what sharing saves cannot be told from runs that all share alike: give one of "
            "`bench.step_times` without --shared-context too"
        )
    _, first, further = np.linalg.lstsq(terms, ms, rcond=None)[0].tolist()
    # Where not even first reads took measurable time, nothing was saved.
    return min(max(further / first, 0.0), 1.0) if first > 0 else 1.0


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope."""
    xs, ys = np.array(points).T
    slope, intercept = np.polyfit(xs, ys, 1).tolist()
    return intercept, slope
