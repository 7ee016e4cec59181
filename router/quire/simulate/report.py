"""Output of ``quire simulate``: table, JSON and plot."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.simulate.result import Result
from quire.worker.request.errors import ConfigError

_COLOURS = ("#1f5fa8", "#d1661a", "#2f8a4c", "#8a4fa0", "#8c6d1f", "#5b6770")
_LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One replay."""

    policy: str
    num_groups: int
    speed: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    hit_rate: float
    balance: float
    prediction_error: float
    digest: str

    @classmethod
    def of(cls, result: Result, *, policy: str, speed: float) -> "Row":
        return cls(
            policy=policy,
            num_groups=result.num_groups,
            speed=speed,
            ttft_mean_s=float(result.ttft_s.mean()),
            ttft_p50_s=result.ttft_quantile_s(0.5),
            ttft_p90_s=result.ttft_quantile_s(0.9),
            ttft_p99_s=result.ttft_quantile_s(0.99),
            hit_rate=result.hit_rate,
            balance=result.balance,
            prediction_error=result.prediction_error,
            digest=result.digest,
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


HEADER = (
    f"{'policy':>14} {'groups':>6} {'speed':>8} {'mean':>8} {'p50':>8} {'p90':>8} {'p99':>8} "
    f"{'hits':>6} {'balance':>7} {'error':>6}"
)
LEGEND = (
    "mean to p99: seconds to the first token; hits: % of prompt tokens found in a cache; "
    "balance: prompt\ntokens computed by the busiest group over the mean; error: % of prompt "
    "tokens by which the router's\nprediction of hits was wrong."
)


def line(row: Row) -> str:
    times = (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s)
    return (
        f"{row.policy:>14} {row.num_groups:>6} {row.speed:>8.4g} "
        + " ".join(f"{time_s:>8.3f}" for time_s in times)
        + f" {100 * row.hit_rate:>6.1f} {row.balance:>7.2f} {100 * row.prediction_error:>6.1f}"
    )


def plot(rows: Sequence[Row], file: Path, *, title: str) -> None:
    """Mean and 99th percentile over speed, a colour per policy; the suffix says PNG or SVG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        module: Any = import_module("matplotlib.figure")
        ticker: Any = import_module("matplotlib.ticker")
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install matplotlib") from None
    figure = module.Figure(figsize=(12, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(1, 2)
    names = list(dict.fromkeys((row.policy, row.num_groups) for row in rows))
    several = len({row.num_groups for row in rows}) > 1
    for index, (policy, num_groups) in enumerate(names):
        mine = [r for r in rows if (r.policy, r.num_groups) == (policy, num_groups)]
        mine.sort(key=lambda row: row.speed)
        style = {"color": _COLOURS[index % len(_COLOURS)], "marker": "o", "markersize": 4}
        style["linestyle"] = _LINES[index // len(_COLOURS) % len(_LINES)]
        style["label"] = f"{policy}, {num_groups} groups" if several else policy
        speeds = [row.speed for row in mine]
        panels[0].plot(speeds, [row.ttft_mean_s for row in mine], **style)
        panels[1].plot(speeds, [row.ttft_p99_s for row in mine], **style)
    for axes, name in zip(panels, ("Mean TTFT", "99th percentile of TTFT"), strict=True):
        axes.set_title(name, fontsize=11, loc="left")
        axes.set_xlabel("speed of the replay")
        axes.set_ylabel("s")
        axes.set_yscale("log")
        # Seconds as one says them, and not as powers of ten.
        axes.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 3, 5)))
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(ticker.FormatStrFormatter("%g"))
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=panels[0].get_lines(), fontsize=9, loc="outside right upper")
    figure.savefig(file)
