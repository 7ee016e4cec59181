"""The results of ``quire bench reuse``: times to the first token by where a prefix was stored."""

from collections.abc import Sequence
from dataclasses import dataclass

PLACES = ("computed", "cache", "host", "disk", "peer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReuseRow:
    num_tokens: int
    """Length of the prefix in tokens."""
    seconds: dict[str, float]
    """Median seconds to the first token, by the place where the prefix was stored."""

    def share(self, place: str) -> float:
        """The time of ``place`` as a share of the time to compute the prompt."""
        return self.seconds[place] / self.seconds["computed"]


def reuse_table(rows: Sequence[ReuseRow]) -> str:
    """A table with a line for each prefix length."""
    others = PLACES[1:]
    lines = [f"{'tokens':>8} {'computed':>10}" + "".join(f"{place:>18}" for place in others)]
    for row in rows:
        cells = [f"{1e3 * row.seconds[place]:8.1f} ms {row.share(place):6.3f}" for place in others]
        lines.append(
            f"{row.num_tokens:8} {1e3 * row.seconds['computed']:7.1f} ms"
            + "".join(f"{cell:>18}" for cell in cells)
        )
    return "\n".join(lines)
