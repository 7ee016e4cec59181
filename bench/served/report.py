"""The tables, in markdown: medians of the runs of each model, load and subject."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.report import markdown, percentile
from bench.served.servers import ROLES

OFFLINE, IDLE = "offline", "idle"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement; figures that its way cannot have keep their defaults."""

    model: str
    load: str
    """Clients, as the second column says it."""
    engine: str
    way: str
    """`OFFLINE`, `IDLE`, or the protocol."""
    tokens_per_s: float = 0.0
    gap_s: float | None = None
    """The median time between tokens of a stream."""
    ttft_s: Sequence[float] = ()
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds per output token, by role."""
    idle_cores: Mapping[str, float] = field(default_factory=dict)
    """Cores that the processes of each role use together without requests."""
    num_failed: int = 0


Key = tuple[str, str, str, str]
Runs = Mapping[Key, Sequence[Run]]


def by_subject(runs: Sequence[Run]) -> Runs:
    found: dict[Key, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.model, run.load, run.engine, run.way].append(run)
    return found


def throughput(runs: Runs) -> str:
    """Output tokens per second; kept = served / offline."""
    ways = list(dict.fromkeys((engine, way) for _, _, engine, way in runs))
    header = ["model", "clients"]
    for engine, way in ways:
        header += [f"{engine} {way}"] + ["kept"] * (way != OFFLINE)
    rows = []
    for model, load in dict.fromkeys((model, load) for model, load, _, _ in runs):
        row = [model, load]
        for engine, way in ways:
            rate = _rate(runs, (model, load, engine, way))
            row.append(_shown(rate, 0))
            if way != OFFLINE:
                offline = _rate(runs, (model, load, engine, OFFLINE))
                row.append("–" if not rate or not offline else f"{rate / offline:.0%}")
        rows.append(row)
    return markdown(header, rows)


def cpu(runs: Runs) -> str:
    """CPU microseconds per output token, by process."""
    served = {key: here for key, here in runs.items() if here[0].cpu_s}
    names = [
        name
        for name in (*ROLES, "client", "others")
        if any(name in run.cpu_s for here in served.values() for run in here)
    ]
    rows = [
        [*key[:2], " ".join(key[2:])]
        + [f"{median(run.cpu_s.get(name, 0.0) for run in here) * 1e6:.0f}" for name in names]
        for key, here in served.items()
    ]
    return markdown(["model", "clients", "server", *names], rows, num_left=3)


def idle(runs: Sequence[Run]) -> str:
    """Shares of a core, by process."""
    rows = []
    for model, engine in dict.fromkeys((run.model, run.engine) for run in runs):
        cores = [run.idle_cores for run in runs if (run.model, run.engine) == (model, engine)]
        shares = [median(each.get(role, 0.0) for each in cores) for role in ROLES]
        whole = median(sum(each.values()) for each in cores)
        rows.append([model, engine, *(f"{share:.1%}" for share in (*shares, whole))])
    return markdown(["model", "server", *ROLES, "together"], rows, num_left=2)


def latency(runs: Runs) -> str:
    """Times to first token and between tokens, in milliseconds, and what failed."""
    rows = []
    for key, here in runs.items():
        if all(run.gap_s is None for run in here):
            continue
        ttft_s = sorted(each for run in here for each in run.ttft_s)
        rows.append(
            [
                *key[:2],
                " ".join(key[2:]),
                _shown(median(run.tokens_per_s for run in here), 0),
                *(_shown(percentile(ttft_s, p) * 1e3 if ttft_s else None, 1) for p in (50, 99)),
                _shown(median(run.gap_s or 0.0 for run in here) * 1e3, 2),
                str(sum(run.num_failed for run in here)),
            ]
        )
    header = ("model", "clients", "subject", "tokens/s", "TTFT p50", "p99", "between tokens")
    return markdown([*header, "failed"], rows, num_left=3)


def tables(runs: Sequence[Run]) -> Iterator[str]:
    quiet = [run for run in runs if run.way == IDLE]
    found = by_subject([run for run in runs if run.way != IDLE])
    if any(run.way == OFFLINE for run in runs):
        yield f"Output tokens per second; kept = served / offline.\n\n{throughput(found)}"
    if any(run.cpu_s for run in runs):
        yield f"CPU time in µs per output token, by process.\n\n{cpu(found)}"
    if quiet:
        yield f"Share of a core while idle, by process.\n\n{idle(quiet)}"
    yield f"Times in ms.\n\n{latency(found)}"


def _rate(runs: Runs, key: Key) -> float | None:
    here = runs.get(key)
    return median(run.tokens_per_s for run in here) if here else None


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
