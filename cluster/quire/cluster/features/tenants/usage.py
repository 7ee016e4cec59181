"""Usage of each tenant's keys since this gateway started, and in each minute of the last hour.

A request is counted when it ends, however it ends, with the prompts that groups began and the
tokens generated until then (`quire.cluster.gateway.metering.Used`).
tokens generated until then (`quire.cluster.features.tenants.metering.Used`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

NUM_MINUTES = 60
_MAX_ROWS = 4096
_OTHERS = ("", "")
"""The row that counts everything beyond `_MAX_ROWS`."""
_METRICS = {
    "requests": "Requests that ended, by tenant and API key.",
    "prompt_tokens": "Prompt tokens of these.",
    "cached_tokens": "Those among them whose KV was cached.",
    "output_tokens": "Tokens that were generated for them.",
}
_MAX_ASKING = 4
"""Most queries at a time: each asks every gateway."""

Answers = tuple[Sequence[dict[str, Any]], str]
"""The other gateways' own answers, and the names of those that did not answer; "" if all did."""
AskOthers = Callable[[str | None], Awaitable[Answers]]


@dataclass(slots=True, kw_only=True)
class Counts:
    """Sums over ended requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was cached."""
    output_tokens: int = 0

    def add(self, other: "Counts") -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens


@dataclass(slots=True)
class _Row:
    total: Counts = field(default_factory=Counts)
    minutes: deque[tuple[int, Counts]] = field(default_factory=lambda: deque(maxlen=NUM_MINUTES))
    """Counts of each minute, by its start in seconds since 1970. Minutes in which no request ended
    are left out."""

    def add(self, counts: Counts, minute_s: int) -> None:
        self.total.add(counts)
        if not self.minutes or self.minutes[-1][0] != minute_s:
            self.minutes.append((minute_s, Counts()))
        self.minutes[-1][1].add(counts)


class UsageLedger(Collector):
    """Usage rows of one gateway, one for each tenant and key; also exported as metrics. On request,
    it adds up the rows of all gateways."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.ask_others: AskOthers = _no_others
        """Set by the code that knows other gateways. It must limit its own time and raise
        nothing."""
        self._wall_clock = wall_clock
        self._since_s = int(wall_clock())
        self._rows: dict[tuple[str, str], _Row] = {}
        self._asking = asyncio.Semaphore(_MAX_ASKING)

    def record(self, tenant: str, key_name: str, counts: Counts) -> None:
        name = (tenant, key_name)
        if name not in self._rows and len(self._rows) >= _MAX_ROWS:
            name = _OTHERS
        now_s = int(self._wall_clock())
        self._rows.setdefault(name, _Row()).add(counts, now_s - now_s % 60)

    async def own(self, tenant: str | None) -> dict[str, Any]:
        """This gateway's usage of ``tenant``, or of all tenants if it is ``None``."""
        # In a thread: thousands of keys take a while, which would stall all streams.
        return await asyncio.to_thread(self._own, tenant)

    def _own(self, tenant: str | None) -> dict[str, Any]:
        rows = list(self._rows.items())  # A copy: rows may be added meanwhile.
        first_s = int(self._wall_clock()) - NUM_MINUTES * 60
        return {
            "object": "list",
            "since": self._since_s,
            "data": [
                {
                    "tenant": name,
                    "key": key_name,
                    **asdict(row.total),
                    "minutes": [
                        {"start": start_s, **asdict(counts)}
                        for start_s, counts in tuple(row.minutes)
                        if start_s > first_s
                    ],
                }
                for (name, key_name), row in sorted(rows, key=itemgetter(0))
                if tenant is None or tenant == name
            ],
        }

    def collect(self) -> Iterator[Metric]:
        for name, help_text in _METRICS.items():
            metric = CounterMetricFamily(f"quire_usage_{name}", help_text, labels=["tenant", "key"])
            for labels, row in list(self._rows.items()):
                metric.add_metric(labels, getattr(row.total, name))
            yield metric

    async def answer(self, tenant: str | None) -> dict[str, Any]:
        """The usage at all gateways, added up. ``since``: when the first of them started.
        ``incomplete``, if present, names those that did not answer."""
        async with self._asking:
            answer, (others, incomplete) = await asyncio.gather(
                self.own(tenant), self.ask_others(tenant)
            )
        if others:
            answer = await asyncio.to_thread(_merged, [answer, *others])
        return {**answer, "incomplete": incomplete} if incomplete else answer


async def _no_others(tenant: str | None) -> Answers:
    return (), ""


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    minutes: dict[tuple[str, str], dict[int, dict[str, int]]] = {}
    for row in (row for answer in answers for row in answer["data"]):
        name = (row["tenant"], row["key"])
        _add(rows.setdefault(name, {"tenant": name[0], "key": name[1]}), row)
        for minute in row["minutes"]:
            sums = minutes.setdefault(name, {}).setdefault(minute["start"], {})
            _add(sums, minute)
    return {
        "object": "list",
        "since": min(answer["since"] for answer in answers),
        "data": [
            {
                **row,
                "minutes": [
                    {"start": start_s, **counts}
                    for start_s, counts in sorted(minutes.get(name, {}).items())
                ],
            }
            for name, row in sorted(rows.items())
        ],
    }


def _add(sums: dict[str, Any], counts: dict[str, Any]) -> None:
    for name in asdict(Counts()):
        sums[name] = sums.get(name, 0) + counts[name]
