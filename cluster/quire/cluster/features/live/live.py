"""The live page's data: once a second, a gateway's state for its viewers.

A tick is computed once for all viewers: the whole state as one event, the *picture*, and the
differences from the previous tick as another, the *change*. A viewer that keeps up receives
changes. A viewer that missed a tick receives the picture again, so that nothing is buffered for
slow readers. Without viewers, only the series of the last minutes is recorded.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from pydantic_core import to_json

from quire import __version__
from quire.cluster.errors import Overloaded
from quire.cluster.features.live.rows import (
    Row,
    call_row,
    group_row,
    newest_first,
    prefix_row,
)
from quire.cluster.features.live.series import Series, Totals, buckets, total
from quire.cluster.links.groups import Groups
from quire.cluster.supervise import keep_going
from quire.cluster.telemetry.metrics import TPOT_BUCKETS, TTFT_BUCKETS, Telemetry
from quire.cluster.telemetry.timeline import Timeline
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable

MAX_VIEWERS = 32
MAX_EVERY_S = 60
MAX_CALLS = 50
"""Most recent calls that are kept, at most some kB each; also while nobody watches."""

_TICK_S = 1.0
_PREFIXES_EVERY = 5
"""Ticks between two updates of the hot prefixes."""
_MAX_PREFIXES = 48
_MAX_DECISIONS = 200
_MAX_GROUPS = 256
"""Most groups in a picture; further ones are only counted."""
_RATE_TICKS = 10
_STALLED_S = 30.0
"""Time in seconds without a read after which a viewer is disconnected."""

Write = Callable[[bytes], Awaitable[None]]


class Watched(NamedTuple):
    """One model's data that the page shows."""

    model: str
    groups: Groups
    table: RoutingTable
    telemetry: Telemetry
    task: str
    """The model's task; empty until known."""
    num_queued: int
    num_inflight: int


class _Counts(NamedTuple):
    """A group's counters at a time of the gateway's clock."""

    at_s: float
    output: int
    prompt: int
    hit: int


class Live:
    """The ticks of one gateway, and its viewers. Belongs to one event loop."""

    def __init__(
        self,
        watched: Callable[[], Sequence[Watched]],
        *,
        tick_s: float = _TICK_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = ""
        """The gateway's name on the page."""
        self.num_viewers = 0
        self.num_ticks = 0
        """Number of ticks computed for viewers."""
        self._watched = watched
        self._tick_s = tick_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._series = Series()
        self._counts: dict[str, deque[_Counts]] = {}  # By group.
        self._names: dict[str, str] = {}  # Group names by address; lost groups keep theirs.
        self._calls: deque[Row] = deque(maxlen=MAX_CALLS)
        self._num_calls = 0
        self._prefixes: list[Row] = []
        self._picture: dict[str, Any] = {}
        self._picture_event: bytes | None = None  # Encoded on first use.
        self._change_event = b""
        self._looked_s = -inf
        self._ticked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self) -> None:
        """Starts ticking, unless it already does. Must be called in the event loop."""
        if self._task is None and not self._is_over:
            self._task = asyncio.create_task(keep_going(self._run, name="the live page"))

    def end(self) -> None:
        """Disconnects the viewers: the gateway is about to stop."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
        self._ticked.set()

    def note(self, call: Timeline) -> None:
        """Shows an ended call, unless it was refused before tokenization."""
        if call.prepared_s is not None:
            self._num_calls += 1
            self._calls.append({"number": self._num_calls, **call_row(call)})

    def check_room(self) -> None:
        """Raises Overloaded if there are as many viewers as allowed."""
        if self.num_viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers watch this gateway's page, and one more exceeds its limit: "
                "close one, or try again in 5 s",
                reason="inflight",
                retry_after_s=5.0,
            )

    async def watch(
        self, write: Write, *, every: int = 1, may_watch: Callable[[], bool] = lambda: True
    ) -> None:
        """Writes a picture and then a change each ``every`` ticks, until the gateway drains, the
        viewer may not watch any longer, or it has not read for a while. Raises Overloaded as
        `check_room` does."""
        self.check_room()
        self.num_viewers += 1
        try:
            self.start()
            if self._clock() - self._looked_s >= self._tick_s:
                self._look()  # Nobody has watched until now.
            seen: int | None = None
            while not self._is_over and may_watch():
                now = self.num_ticks
                is_next = seen is not None and now == seen + 1
                event = self._change_event if is_next and every == 1 else self._whole_event()
                async with asyncio.timeout(_STALLED_S):
                    await write(event)
                seen = now
                while self.num_ticks < seen + every and not self._is_over:
                    await self._ticked.wait()
        except TimeoutError:
            return
        finally:
            self.num_viewers -= 1

    async def _run(self) -> None:
        next_s = self._clock()
        while True:
            # No catching up if the loop was held up.
            next_s = max(next_s + self._tick_s, self._clock())
            await asyncio.sleep(next_s - self._clock())
            self._sample()
            if self.num_viewers:
                self._look()

    def _sample(self) -> None:
        """Records the next point of the series and each group's counters."""
        watched, now_s = self._watched(), self._clock()
        telemetry = [each.telemetry for each in watched]
        totals = Totals(
            prompt_tokens=total(each.prompt_tokens for each in telemetry),
            cached_tokens=total(each.cached_tokens for each in telemetry),
            output_tokens=total(each.output_tokens for each in telemetry),
            first_tokens=buckets(each.time_to_first_token for each in telemetry),
            per_token=buckets(each.time_per_output_token for each in telemetry),
        )
        loads = {
            str(group_id): load for each in watched for group_id, load in each.groups.loads.items()
        }
        self._series.add(
            totals,
            ttft_bounds=TTFT_BUCKETS,
            tpot_bounds=TPOT_BUCKETS,
            num_queued=sum(each.num_queued for each in watched),
            num_running=sum(load.num_running for load in loads.values()),
            at_s=self._wall_clock(),
            now_s=now_s,
        )
        self._counts = {
            name: self._counts.get(name) or deque(maxlen=_RATE_TICKS + 1) for name in loads
        }
        for name, load in loads.items():
            counts = _Counts(
                now_s, load.num_output_tokens, load.num_prompt_tokens, load.num_hit_tokens
            )
            if self._counts[name] and self._counts[name][-1].output > counts.output:
                self._counts[name].clear()  # The group was restarted.
            self._counts[name].append(counts)

    def _look(self) -> None:
        """Computes a tick: the picture, and its difference from the previous one."""
        watched, self._looked_s = self._watched(), self._clock()
        if self.num_ticks % _PREFIXES_EVERY == 0 or not self._picture:
            self._look_at_prefixes(watched)
        before, self._picture = self._picture, self._paint(watched)
        self._picture_event = None
        self._change_event = _event("change", _change(before, self._picture))
        self.num_ticks += 1
        self._ticked.set()
        self._ticked = asyncio.Event()

    def _look_at_prefixes(self, watched: Sequence[Watched]) -> None:
        share = max(1, _MAX_PREFIXES // max(1, len(watched)))
        self._prefixes = [
            prefix_row(prefix, model=each.model, block_size=each.table.block_size)
            for each in watched
            for prefix in each.table.hot_prefixes(share)
        ]

    def _paint(self, watched: Sequence[Watched]) -> dict[str, Any]:
        points = self._series.points
        rows = list(self._group_rows(watched))
        loads = [load for each in watched for load in each.groups.loads.values()]
        return {
            "gateway": {
                "name": self.name,
                "num": max([1, *(load.num_gateways for load in loads)]),
                "version": __version__,
                "models": [{"name": each.model, "task": each.task} for each in watched],
                "viewers": self.num_viewers,
                "inflight": sum(each.num_inflight for each in watched),
                "num_groups": sum(len(each.groups.clients) for each in watched),
            },
            "now": round(self._wall_clock(), 2),
            "point": points[-1] if points else None,
            "groups": {f"{row['model']}/{row['group']}": row for row in rows},
            "decisions": newest_first(
                [found for each in watched for found in each.table.recent(_MAX_DECISIONS)],
                _MAX_DECISIONS,
            ),
            "calls": list(self._calls),
            "prefixes": self._prefixes,
        }

    def _group_rows(self, watched: Sequence[Watched]) -> Iterator[Row]:
        clients = [(each, client) for each in watched for client in each.groups.clients]
        names = {}
        for each, client in clients[:_MAX_GROUPS]:
            if client.is_attached:
                name = client.description.group_id
            else:
                name = self._names.get(client.address, client.address)
            names[client.address] = name
            load = each.groups.loads.get(GroupId(name))
            rate, hit_rate = self._rates(name)
            yield group_row(
                client,
                load if client.is_attached else None,
                name=name,
                model=each.model,
                is_routed_to=each.groups.is_routed_to(client),
                tokens_per_s=rate,
                hit_rate=hit_rate,
            )
        self._names = names

    def _rates(self, name: str) -> tuple[float, float | None]:
        """A group's recent tokens per second, and the recent share of its prompt tokens that was
        cached."""
        counts = self._counts.get(name)
        if not counts:
            return 0.0, None
        first, last = counts[0], counts[-1]
        duration_s, num_prompt = last.at_s - first.at_s, last.prompt - first.prompt
        rate = (last.output - first.output) / duration_s if duration_s > 0 else 0.0
        return rate, (last.hit - first.hit) / num_prompt if num_prompt > 0 else None

    def _whole_event(self) -> bytes:
        if self._picture_event is None:
            whole = {**self._picture, "series": list(self._series.points)}
            self._picture_event = _event("picture", whole)
        return self._picture_event


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The difference between two pictures. Groups, calls and decisions have only new or changed
    rows; other changed fields are whole. ``gone`` names the groups that are no longer there."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    former, groups = before.get("groups", {}), after["groups"]
    changed["groups"] = {key: row for key, row in groups.items() if former.get(key) != row}
    changed["gone"] = [key for key in former if key not in groups]
    last = max((row["number"] for row in before.get("calls", ())), default=0)
    changed["calls"] = [row for row in after["calls"] if row["number"] > last]
    known = {(row["id"], row["attempt"]): row for row in before.get("decisions", ())}
    changed["decisions"] = [
        row for row in after["decisions"] if known.get((row["id"], row["attempt"])) != row
    ]
    return changed


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(content))
