"""How right the gateway's forecasts of the time to first token were, as `quire explain` shows them.

A forecast is of the time from routing to the first token at the gateway, made as the request is
routed, from what earlier requests saw of the group (`quire.router.policies.line`).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from bench.serving.figures import WARM_UP

Forecast = tuple[float | None, float]
"""Seconds from routing to the first token: as forecast, if they were, and as they were."""

_MIN_WAIT_S = 1e-3
"""As in the gateway's own metric: errors are shares of no less."""


def forecast_table(runs: Sequence[tuple[str, Sequence[Forecast]]]) -> Iterator[str]:
    """Markdown: a line for each label, over the requests of all its runs behind the warm-up."""
    by_label: dict[str, list[Forecast]] = {}
    for label, forecasts in runs:
        by_label.setdefault(label, []).extend(forecasts[int(WARM_UP * len(forecasts)) :])
    lines = [
        _line(label, [(f, w) for f, w in every if f is not None], len(every))
        for label, every in by_label.items()
        if any(forecast is not None for forecast, _ in every)
    ]
    if lines:
        yield "Forecasts of the time from routing to the first token:\n"
        yield (
            "| policy | requests | forecast | error ÷ wait, median | 90th percentile | "
            "error, median, ms | sum of forecasts ÷ of waits |"
        )
        yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
        yield from lines
        yield ""


def _line(label: str, known: Sequence[tuple[float, float]], num_requests: int) -> str:
    forecast_s, waited_s = np.array(known).T
    error_s = np.abs(forecast_s - waited_s)
    ratio = error_s / np.maximum(waited_s, _MIN_WAIT_S)
    return (
        f"| {label} | {num_requests} | {len(known)} | {np.median(ratio):.0%} | "
        f"{np.quantile(ratio, 0.9):.0%} | {1000 * np.median(error_s):.1f} | "
        f"{forecast_s.sum() / waited_s.sum():.2f} |"
    )
