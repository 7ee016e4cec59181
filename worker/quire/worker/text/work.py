"""How much work compiling a constraint is, counted before it is compiled.

llguidance bounds some of its work by fuel. What it does not bound is counted here, in units of
about 25 µs (llguidance 1.9.1): some inputs of a few hundred bytes would take it seconds, and chains
of a thousand references overflow its stack, which ends the process.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

_MAX_WORK, _BYTES_A_UNIT = 2_000, 25
"""About 50 ms, and a microsecond more for each byte: honest inputs are large by their text."""
_MAX_CHAIN = 600
"""The least that overflows a stack of 8 MB was measured at 2,000."""
TOO_LONG = "compiling that takes too long"


class Work:
    """Units of work by their cause."""

    def __init__(self) -> None:
        self._units: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()

    def add(self, cause: str, units: float, *, number: int = 1) -> None:
        """``number``: of the things that ``cause`` names, which take ``units`` together; 0 where
        it names one."""
        self._units[cause] += units  # type: ignore[assignment]
        self._numbers[cause] += number

    def check(self, num_bytes: int) -> None:
        """Raises ValueError: it is too much for a text of ``num_bytes``."""
        if sum(self._units.values()) > _MAX_WORK + num_bytes / _BYTES_A_UNIT:
            cause = max(self._units, key=self._units.__getitem__)
            number = self._numbers[cause]
            raise ValueError(f"{number} {cause}: {TOO_LONG}" if number else f"{cause}: {TOO_LONG}")


def check_chain(weights: Mapping[str, int], references: Mapping[str, Iterable[str]]) -> list[str]:
    """All names, each behind those that it refers to as far as there is no cycle.

    ``weights``: levels of nesting by name; ``references``: the names that each refers to.
    Names without cycles count along their longest path, and those that are part of a cycle or refer
    to one all together: a bound, whatever the order in which references are followed.

    Raises:
        ValueError: The references lead too deep.
    """
    targets = {name: set(references.get(name, ())) & weights.keys() for name in weights}
    users: dict[str, list[str]] = {name: [] for name in weights}
    for name, found in targets.items():
        for target in found:
            users[target].append(name)
    depths = dict.fromkeys(weights, 0)
    unresolved = {name: len(found) for name, found in targets.items()}
    ready = [name for name, number in unresolved.items() if not number]
    deepest = 0
    order = []
    while ready:
        name = ready.pop()
        del unresolved[name]
        order.append(name)
        depth = depths[name] + weights[name]
        deepest = max(deepest, depth)
        for user in users[name]:
            depths[user] = max(depths[user], depth)
            unresolved[user] -= 1
            if not unresolved[user]:
                ready.append(user)
    deepest += sum(weights[name] for name in unresolved)
    if deepest > _MAX_CHAIN:
        raise ValueError(f"references lead {deepest} levels deep, at most {_MAX_CHAIN} may be")
    return [*order, *unresolved]
