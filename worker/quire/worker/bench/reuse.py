"""What ``quire bench reuse`` found: times to the first token by where a prefix was."""

from collections.abc import Sequence
from dataclasses import dataclass

PLACES = ("computed", "cache", "host", "disk", "peer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReuseRow:
    num_tokens: int
    """Length of the prefix."""
    seconds: dict[str, float]
    """Medians of the seconds to the first token, by place."""

    def share(self, place: str) -> float:
        """Share of the time that computing the prompt takes."""
        return self.seconds[place] / self.seconds["computed"]


def reuse_table(rows: Sequence[ReuseRow]) -> str:
    """A line for each length."""
    others = PLACES[1:]
    lines = [f"{'tokens':>8} {'computed':>10}" + "".join(f"{place:>18}" for place in others)]
    for row in rows:
        cells = [f"{1e3 * row.seconds[place]:8.1f} ms {row.share(place):6.3f}" for place in others]
        lines.append(
            f"{row.num_tokens:8} {1e3 * row.seconds['computed']:7.1f} ms"
            + "".join(f"{cell:>18}" for cell in cells)
        )
    return "\n".join(lines)
