"""Reports the outcome of injected faults, and the time of requests compared to recomputation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.report import markdown, percentile

from quire.worker.request.outputs import Fetched

MOST = 1.1
MOST_BEHIND_S = 0.003
"""A request may take `MOST` times as long as recomputation, and so much longer."""
_TOO_LATE = " too late: "


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request."""

    kind: str
    """The fault's kind, or what was asked without one."""
    seconds: float
    computed_s: float
    """The same prompt, without a cache, measured beside."""
    wait_s: float = 0.0
    told: str = ""
    """What the engine reported about its blocks."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.computed_s

    @property
    def is_late(self) -> bool:
        return self.seconds > MOST * self.computed_s + MOST_BEHIND_S


@dataclass
class Tally:
    """Counts for one kind of fault."""

    num_injected: int = 0
    num_named: int = 0
    num_given_up: int = 0
    """The request computed before the fault could show, and said that."""
    num_harmless: int = 0
    """Requests whose blocks all arrived intact."""
    num_unmet: int = 0
    """Faults that no request met. They are not among those injected."""
    unnamed: list[str] = field(default_factory=list)
    """Those that could have been noticed, and were not."""


@dataclass
class Report:
    tallies: dict[str, Tally] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    patient: list[Asked] = field(default_factory=list)
    """Those whose times say nothing."""
    computed: list[Asked] = field(default_factory=list)
    """Recomputation beside recomputation: what the machine alone makes of equal times."""
    wrong: list[str] = field(default_factory=list)

    def tally(self, kind: str) -> Tally:
        return self.tallies.setdefault(kind, Tally())

    def judge(
        self,
        kind: str,
        fetched: Fetched,
        *,
        is_met: bool = True,
        is_named: bool = False,
        is_harmless: bool = False,
    ) -> None:
        """Counts what became of a fault. ``is_met``: what was damaged was used. ``is_named``:
        something besides the request's error tells of it."""
        tally, error = self.tally(kind), fetched.error
        if is_named or (error and _TOO_LATE not in error):
            tally.num_named += 1
        elif error:
            tally.num_given_up += 1
        elif is_harmless:
            tally.num_harmless += 1
        elif not is_met:
            tally.num_unmet += 1
            return
        else:
            tally.unnamed.append(f"{kind}: {fetched}")
        tally.num_injected += 1

    @property
    def has_failed(self) -> bool:
        return bool(self.wrong or any(each.unnamed for each in self.tallies.values()))

    def lines(self) -> list[str]:
        kinds = sorted({each.kind for each in (*self.asked, *self.patient)})
        asked = {kind: [each for each in self.asked if each.kind == kind] for kind in kinds}
        rows = []
        for kind in kinds:
            tally = self.tallies.get(kind, Tally())
            found = (
                *(tally.num_injected, tally.num_named, tally.num_given_up),
                *(tally.num_harmless, tally.num_unmet),
            )
            told = [str(each) if kind in self.tallies else "" for each in found]
            num_late = sum(each.is_late for each in asked[kind])
            num = len(asked[kind]) + sum(each.kind == kind for each in self.patient)
            rows.append(
                [kind, str(num), *told, str(len(asked[kind])), *_ratios(asked[kind]), str(num_late)]
            )
        for name, requests in (("all", self.asked), ("recomputed again", self.computed)):
            num_late = sum(each.is_late for each in requests)
            blank = ["", "", "", "", "", str(len(requests))]
            rows.append([name, "", *blank, *_ratios(requests), str(num_late)])
        header = ["", "requests", "faults", "named", "given up before", "harmless", "met nobody"]
        header += ["timed", "median", "p99.9", "most", f"> {MOST} + {MOST_BEHIND_S * 1e3:g} ms"]
        num_faults = sum(each.num_injected for each in self.tallies.values())
        num_unmet = sum(each.num_unmet for each in self.tallies.values())
        unnamed = [line for each in self.tallies.values() for line in each.unnamed]
        latest = sorted(self.asked, key=lambda each: each.computed_s * MOST - each.seconds)[:12]
        return [
            markdown(header, rows),
            f"\n{len(self.asked) + len(self.patient)} requests, {len(self.wrong)} with wrong "
            f"tokens; {num_faults} faults, {len(unnamed)} not named; "
            f"{num_unmet} more met nobody",
            *self.wrong[:10],
            *unnamed[:10],
            "\nthe latest:",
            *(
                f"  {each.seconds * 1e3:6.1f} ms beside {each.computed_s * 1e3:5.1f}, waited "
                f"{each.wait_s * 1e3:5.1f}: {each.kind}; {each.told[:110]}"
                for each in latest
                if each.is_late
            ),
        ]


def _ratios(requests: Sequence[Asked]) -> list[str]:
    ratios = [each.ratio for each in requests]
    return [
        f"{percentile(ratios, 50):.2f}",
        f"{percentile(ratios, 99.9):.2f}",
        f"{max(ratios, default=0):.2f}",
    ]
