"""A cost model from what ``quire bench step`` measured on one's own machine."""

import json
import re
from pathlib import Path

import numpy as np

from quire.router.simulate.cost import CostModel
from quire.worker.errors import ConfigError


def fit_cost(paths: list[Path], *, num_cache_tokens: int) -> CostModel:
    """Least squares through the medians in the JSON files of one or more runs.

    A prefill is ``base + per_token * n``; with one size of chunk only, the base is the shortest
    decode step. A decode step is a line in the tokens that the batch holds. Runs with several
    ``--chunk`` and ``--context`` say more. Of runs in both modes, the first is taken.

    Raises:
        ConfigError: A file is none of those, or no two batches were measured.
    """
    prefills: list[tuple[float, float]] = []
    decodes: list[tuple[float, float]] = []
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
                    held = int(decode[1]) * (report["context"] + report["num_steps"] / 2)
                    decodes.append((held / num_cache_tokens, median_ms))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: {error}; give the JSON of `quire bench step`") from None
    if len({fill for fill, _ in decodes}) < 2 or not prefills:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: need a prefill and decodes of two batches at least; "
            "run `quire bench step --batches 1 32 128`"
        )
    decode_base, decode_linear = _line(decodes)
    if len({num_tokens for num_tokens, _ in prefills}) < 2:
        prefills.append((0.0, min(ms for _, ms in decodes)))
    base, per_token = _line(prefills)
    return CostModel(
        base=max(base, 0.0),
        per_token=per_token,
        decode_base=max(decode_base, 0.0),
        decode_linear=max(decode_linear, 0.0),
        num_cache_tokens=num_cache_tokens,
    )


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope."""
    xs, ys = np.array(points).T
    slope, intercept = np.polyfit(xs, ys, 1).tolist()
    return intercept, slope
